#!/usr/bin/env bash
# Usage: ./run_bench.sh [OPTION ...]
#
# Today's trainer with and without prefix sharing, side by side, in alternating repeats at k = 8: first their seconds,
# then their memory, because what makes resident memory mean "alive" takes time (docs/measuring.md). Then other k, and
# 30 updates with a reward that can be learned. Seconds are those of the second step, three times, and five for arms that
# share the prompt, which are less than 10 % apart; memory is measured once, as repeats of it agree within 0.4 %. Half an
# hour on 2 cores; the same command goes on where it was stopped. Writes
# results/MACHINE/: a folder a run, and runs.jsonl of all, charts, report.html. Exit codes: 1: some run failed, 5:
# --minutes left some.
# Options: --device cpu --minutes 30 (of each of eight suites) --results FOLDER --machine NAME ...
# Paths are those where you stand. All options: .venv/bin/python -m experiments.suite --help
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
. "$here/experiments/start.sh"
for at in bench-time:3 bench:1; do
  suite --scale ${at%:*} --repeats ${at#*:} --arms stock-compact,stock-compact-accumulate,shared,shared-accumulate --k 8 "$@"
  suite --scale ${at%:*} --repeats ${at#*:} --arms shared --k 8 --completions-per-forward 8 "$@"
done
suite --scale bench-time --repeats 5 --arms shared,shared-accumulate --k 8 "$@"
suite --scale bench-time --repeats 5 --arms shared --k 8 --completions-per-forward 8 "$@"
suite --scale bench --repeats 1 --arms shared-accumulate --k 2,16,64 "$@"
suite --scale bench --repeats 1 --arms stock-compact --k 2,4 "$@"
# A reward that can be learned, 30 updates, same seed: training is not harmed
suite --arms stock,shared,shared-accumulate --scale learn --k 4 "$@"
results=$("$python" -m experiments.suite --arms stock --k 4 "$@" --print-folder)
"$here/visualize_results.sh" "$results" || worst=$?
echo "results: $results"
echo "next: open $results/report.html"
exit "$worst"
