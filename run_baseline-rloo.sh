#!/usr/bin/env bash
# Usage: ./run_baseline-rloo.sh [OPTION ...]
#
# Measures the untouched trainers of TRL 0.21 and 1.16 at k = 2, 4, 8. Each run is a process of its own. The same
# command goes on where it was stopped. Writes results/MACHINE/: a folder a run, and runs.jsonl of all. Exit codes:
# 1: some run failed, 5: --minutes left some.
# Options: --k 2,4 --repeats 3 --scale test (minutes) --device cpu --minutes 30 --results FOLDER --machine NAME ...
# Paths are those where you stand. All options: .venv/bin/python -m experiments.suite --help
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$here/experiments/start.sh"
suite --arms classic-baseline,stock "$@"
results=$("$python" -m experiments.suite --arms stock "$@" --print-folder)
echo "results: $results"
printf 'next:%s\n' "$(printf ' %q' "$here/run_improve-rloo.sh" "$@")"
exit "$worst"
