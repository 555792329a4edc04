#!/usr/bin/env bash
# The changed trainers at k = 2, 4, 8. Options are passed on: ./run_improve-rloo.sh --repeats 3 --k 2,4
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
worst=0
suite() { # after failed runs the next suite begins all the same; not after a bad option (2) or a signal (128 + n)
  SCRIPT_PID=$$ .venv/bin/python -m experiments.suite "$@" || worst=$?
  [ "$worst" -le 1 ] || exit "$worst"
}
suite --arms classic-string,classic-string-exact,classic-lean,shared "$@"
if [ $# -eq 0 ]; then
  # Prompts below the 1,024-token cut, where the published change has nothing to cut
  suite --arms classic-baseline,classic-string --scale short --k 2
  # A reward that can be learned, 30 updates, same seed: training is not harmed
  suite --arms classic-baseline,classic-lean --scale learn --k 4
fi
exit "$worst"
