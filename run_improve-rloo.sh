#!/usr/bin/env bash
# Usage: ./run_improve-rloo.sh [OPTION ...]
#
# Measures the changed trainers at k = 2, 4, 8: the published change, the same with nothing cut, and what this project
# does. Without options also prompts below the published cut, and 30 updates with a reward that can be learned. The same
# command goes on where it was stopped. Writes results/MACHINE/: a folder a run, and runs.jsonl of all. Exit codes:
# 1: some run failed, 5: --minutes left some.
# Options: --k 2,4 --repeats 3 --scale test (minutes) --device cpu --minutes 30 --results FOLDER --machine NAME ...
# Paths are those where you stand. All options: .venv/bin/python -m experiments.suite --help
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$here/experiments/start.sh"
suite --arms classic-string,classic-string-exact,classic-lean,shared "$@"
if [ $# -eq 0 ]; then
  # Prompts below the 1,024-token cut, where the published change has nothing to cut
  suite --arms classic-baseline,classic-string --scale short --k 2
  # A reward that can be learned, 30 updates, same seed: training is not harmed
  suite --arms classic-baseline,classic-lean --scale learn --k 4
fi
results=$("$python" -m experiments.suite --arms stock "$@" --print-folder)
echo "results: $results"
printf 'next: %q %q\n' "$here/visualize_results.sh" "$results"
exit "$worst"
