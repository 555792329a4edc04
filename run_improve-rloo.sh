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
case " $* " in *" --help "* | *" -h "*) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
"$here/setup_env.sh" --quiet
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # a folder `experiments` where you stand is not ours
python=$here/.venv/bin/python worst=0
suite() { # after failed runs the next suite begins all the same; not after a bad option (2) or a signal (128 + n)
  SCRIPT_PID=$$ "$python" -m experiments.suite "$@" || worst=$?
  case "$worst" in 0 | 1 | 5) ;; *) exit "$worst" ;; esac
}
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
