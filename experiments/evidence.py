"""All that README.md and docs show, measured by this commit on one quiet machine.

    python -m experiments.evidence [--machine NAME] [--trl CLONE] [ITEM ...]

An item that this commit has measured is not repeated, one that was stopped goes on, and one that fails keeps no other
from running. Prints how long is left, as far as that is known from last time. Writes results/<machine>/evidence.csv, a
row an item with its minutes, and says at the end which figures are older than the code. TRL's own tests need a clone
of its repository. Exit code 1: some item failed.
"""

import os
import subprocess
import sys
import time
from functools import partial

from experiments.bench import rivals
from experiments.checks import age
from experiments.commit import is_same_code
from experiments.config import ROOT
from experiments.measuring import EXIT_VERDICT, FACTS, place
from experiments.processes import end_with, stoppable
from experiments.record import read_csv, write_csv
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, choose, program

COLUMNS = ("item", "minutes", "exit_code", *FACTS)
MEASURED = ("0", str(EXIT_VERDICT))  # exit codes of what was measured to the end
ITEMS = {  # modules of experiments, or scripts
    "baseline": "./run_baseline-rloo.sh",
    "improved": "./run_improve-rloo.sh",
    "short": "suite --arms classic-baseline,classic-string --scale short --k 2",
    "exact": "suite --arms classic-baseline,classic-lean --scale exact --k 2",
    "learn": "suite --arms classic-baseline,classic-lean --scale learn --k 4",
    "step": "./run_bench.sh",
    **{name: f"bench {name}" for name in ("worth", "lengths", "alike", "decoding", "rivals", "families")},
    "planner": "checks.planner_check",
    "speed": "checks.speed_check --machine {machine}",
    "published": "checks.published_peaks",
    "models": "checks.model_families --write docs/models.md",
    "upstream": "checks.upstream_tests {trl}",
    "ranges": "checks.measured_ranges",
}
PLACELESS = ("speed", "published", "models", "ranges")  # they take no folder for results


@stoppable()
@program("evidence")
def main(argv: list[str] | None) -> int:
    parser = Parser("evidence", __doc__)
    parser.add_argument("--trl", help="a clone of https://github.com/huggingface/trl; without one, `upstream` is left")
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"these alone, of: {', '.join(ITEMS)}")
    args = parser.parse_args(argv)
    asked = [choose("item", name, ITEMS) for name in args.items] or list(ITEMS)
    here = place(args)
    path, commit = here.folder / "evidence.csv", here.facts["commit"]
    table = {row["item"]: row for row in read_csv(path)}

    def is_done(name: str) -> bool:
        row = table.get(name)
        return row is not None and is_same_code(row["commit"], commit) and row["exit_code"] in MEASURED

    todo = [name for name in asked if not is_done(name) and (args.trl or name != "upstream")]
    if "rivals" in todo and (problem := rivals.lacking()):
        raise ConfigError(problem)
    for number, name in enumerate(todo):
        known = [float(table[each]["minutes"]) for each in todo[number:] if each in table]
        print(f"{name}: {number + 1} of {len(todo)}, {sum(known):.0f} minutes left where it is known", flush=True)
        words = ITEMS[name].format(trl=args.trl, machine=here.folder.name).split()
        if not words[0].startswith("./"):
            words = [sys.executable, "-m", f"experiments.{words[0]}", *words[1:]]
        if name not in PLACELESS:
            words += ["--machine", here.folder.name, "--results", str(here.folder.parent)]
        began, before = time.monotonic(), table.get(name)
        environment, dies = os.environ | {"PYTHONPATH": str(ROOT)}, partial(end_with, os.getpid())
        code = subprocess.run(words, cwd=ROOT, env=environment, preexec_fn=dies).returncode
        minutes = (time.monotonic() - began) / 60
        if before is not None and before["commit"] == commit and before["exit_code"] not in MEASURED:
            minutes += float(before["minutes"])  # it was stopped then
        table[name] = {"item": name, "minutes": f"{minutes:.1f}", "exit_code": str(code), **here.facts}
        write_csv(path, COLUMNS, list(table.values()))
    age.main([])
    failed = [name for name in ITEMS if name in table and table[name]["exit_code"] not in MEASURED]
    print(f"failed: {', '.join(failed)}" if failed else f"all is measured by {commit}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
