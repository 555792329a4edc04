"""How old the committed figures are: for each table its commit, and how often what it measures has changed since.

    python -m experiments.checks.age

Reads results/<machine>/runs.jsonl and every CSV with a column `commit`. What is on top is measured anew first:
`make evidence` does all of it.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from experiments.commit import PATHS, SOURCES
from experiments.config import ROOT
from experiments.record import read_csv
from experiments.run_options import Parser
from experiments.run_record import kept_runs
from rloo_memory.errors import ConfigError, program


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


def git(*command: str) -> str:
    """Raises `ConfigError` with git's last line where it fails."""
    try:
        said = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise ConfigError(
            f"git {command[0]}: {why}; a shallow clone knows no earlier commits: git fetch --unshallow"
        ) from error
    return said.stdout.strip()


def is_commit(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{7,40}", text) is not None


@program("age")
def main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checks.age", description=__doc__.split("\n")[0])
    parser.parse_args(argv)
    found = tables(ROOT / "results")
    commits = {commit for _, commit in found if is_commit(commit)}
    for table, commit in sorted(found):
        if commit not in commits:  # changed files, or what no program here writes
            print(f"   ? changes since  {commit!r}, which is no commit  {table} ({found.pop((table, commit))} rows)")
    since = {commit: int(git("rev-list", "--count", f"{commit}..HEAD", "--", *PATHS)) for commit in commits}
    days = {commit: git("log", "-1", "--format=%cs", commit) for commit in commits}
    for (table, commit), rows in sorted(found.items(), key=lambda item: -since[item[0][1]]):
        print(f"{since[commit]:4} changes since  {days[commit]}  {commit}  {table} ({rows} rows)")
    print(f"measured by {', '.join(sorted(commits))}; changes are later commits that touch {', '.join(SOURCES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
