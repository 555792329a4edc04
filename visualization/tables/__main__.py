"""Bring the tables of pages up to date.

python -m visualization.tables PAGE ...
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from visualization.tables import fill


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables that differ, and print their names."""
    parser = argparse.ArgumentParser(prog="python -m visualization.tables", description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE", help="a page with table markers")
    for page in parser.parse_args(argv).pages:
        text, stale = fill(page)
        if stale:
            page.write_text(text)
            print(f"{page}: {', '.join(stale)}")


if __name__ == "__main__":
    main()
