"""How old the committed figures are: for each table its commit, and how often what it measures has changed since.

    python -m experiments.checks.age

Reads results/<machine>/runs.jsonl and every CSV with a column `commit`. What is on top is measured anew first:
`make evidence` does all of it. "?" stands for a commit that git does not know here, as in a shallow clone.
"""

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

from experiments.commit import PATHS, SOURCES
from experiments.config import ROOT
from experiments.record import read_csv
from experiments.run_options import Parser
from experiments.run_record import kept_runs
from rloo_memory.errors import program


def tables(results: Path) -> Counter[tuple[str, str]]:
    """(table, commit) -> how many rows. A table is a file, or one measurement or scale in it."""
    found = Counter()
    for machine in sorted(path for path in results.iterdir() if path.is_dir()):
        for run in kept_runs(machine).values():
            found[f"{machine.name}/runs.jsonl, {run.record['scale']}", run.record["commit"]] += 1
        for path in sorted(machine.glob("*.csv")):
            for row in read_csv(path):
                if row.get("commit"):
                    part = f", {row['measurement']}" if "measurement" in row else ""
                    found[f"{machine.name}/{path.name}{part}", row["commit"]] += 1
    return found


def changes_since(commit: str) -> str:
    command = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD", "--", *PATHS]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "?"


@program("age")
def main(argv: list[str] | None) -> int:
    Parser("checks.age", __doc__, place=False).parse_args(argv)
    found = tables(ROOT / "results")
    since = {commit: changes_since(commit) for _, commit in found}
    rows = [(since[commit], commit, f"{table} ({number} rows)") for (table, commit), number in found.items()]
    for row in sorted(rows, key=lambda row: -math.inf if row[0] == "?" else -int(row[0])):
        print("{:>4} changes since  {}  {}".format(*row))
    print(f"changes are later commits that touch {', '.join(SOURCES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
