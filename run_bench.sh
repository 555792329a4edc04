#!/usr/bin/env bash
# Today's trainer with and without prefix sharing, side by side: five alternating repeats at k = 8, then other k.
# Options are passed on to the suite: ./run_bench.sh --device cuda
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
worst=0
suite() { # after failed runs the next suite begins all the same; not after a bad option (2) or a signal (128 + n)
  SCRIPT_PID=$$ .venv/bin/python -m experiments.suite "$@" || worst=$?
  [ "$worst" -le 1 ] || exit "$worst"
}
suite --scale bench --arms stock,stock-accumulate,stock-compact,shared --k 8 --repeats 5 "$@"
suite --scale bench --arms shared --k 8 --repeats 5 --completions-per-forward 8 "$@"
suite --scale bench --arms stock-compact --k 2,4,16 "$@"
suite --scale bench --arms shared --k 2,4,16,32,64 "$@"
# A reward that can be learned, 30 updates, same seed: training is not harmed
suite --arms stock,shared --scale learn --k 4 "$@"
./visualize_results.sh
exit "$worst"
