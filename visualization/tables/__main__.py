"""Tables of committed results in pages.

python -m visualization.tables README.md --write | --check
python -m visualization.tables RESULTS_MACHINE_DIR
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from visualization.results import load
from visualization.tables import fill, page


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or check tables; 1 when --check finds a stale one."""
    parser = argparse.ArgumentParser(prog="python -m visualization.tables", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a page with table markers, or results/<machine> to print its tables")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="bring the page's tables up to date")
    action.add_argument("--check", action="store_true", help="exit 1 and name each table that is not up to date")
    args = parser.parse_args(argv)
    if args.path.is_dir():
        print(page(load(args.path)), end="")
        return 0
    if not (args.path.exists() and (args.write or args.check)):
        parser.error(f"{args.path}: give results/<machine>, or a page and --write or --check")
    text, stale = fill(args.path)
    if args.write and stale:
        args.path.write_text(text)
    for table in stale:
        print(f"{args.path}: table {table} " + ("is out of date; run with --write" if args.check else "written"))
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
