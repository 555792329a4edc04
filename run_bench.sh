#!/usr/bin/env bash
# Today's trainer with and without prefix sharing, side by side, in alternating repeats at k = 8: first their seconds,
# then their memory, because what makes resident memory mean "alive" takes time (docs/measuring.md). Then other k.
# Options are passed on to the suite: ./run_bench.sh --device cuda
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
worst=0
suite() { # after failed runs the next suite begins all the same; not after a bad option (2) or a signal (128 + n)
  SCRIPT_PID=$$ .venv/bin/python -m experiments.suite "$@" || worst=$?
  [ "$worst" -le 1 ] || exit "$worst"
}
for runs in "bench-time --repeats 3" "bench --repeats 2"; do
  suite --scale $runs --arms stock,stock-accumulate,stock-compact,shared,shared-accumulate --k 8 "$@"
  suite --scale $runs --arms shared --k 8 --completions-per-forward 8 "$@"
done
suite --scale bench --arms stock-compact --k 2,4,16 "$@"
suite --scale bench --arms shared,shared-accumulate --k 2,4,16,32,64 "$@"
# A reward that can be learned, 30 updates, same seed: training is not harmed
suite --arms stock,shared,shared-accumulate --scale learn --k 4 "$@"
./visualize_results.sh "$(.venv/bin/python -m experiments.suite --arms stock --k 4 "$@" --print-folder)"
exit "$worst"
