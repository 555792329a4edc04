#!/usr/bin/env bash
# Usage: ./visualize_results.sh [results/MACHINE ...]
#
# Draws the charts and tables of the machine that it runs on, or of the folders named, from their runs as they are now.
# Writes results/MACHINE/: report.html, charts/*.png, charts/*.svg, charts/tables.md, runs.jsonl, combined_*.csv.
# Prints the peaks, what they mean and where the page is.
# Paths are those where you stand. Runs come from ./run_baseline-rloo.sh, ./run_improve-rloo.sh and ./run_bench.sh.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case " $* " in *" --help "* | *" -h "*) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
if [ $# -eq 0 ] && [ ! -e "$here/.venv" ]; then
  echo "visualize_results: nothing was run here yet; run ./run_baseline-rloo.sh first, or name results/MACHINE" >&2
  exit 2
fi
"$here/setup_env.sh" --quiet
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # a folder `experiments` where you stand is not ours
python=$here/.venv/bin/python
if [ $# -eq 0 ]; then
  own=$here/results/$("$python" -m experiments.run_device)
  set -- "${own#"$PWD/"}"
  if [ ! -d "$1" ]; then
    echo "visualize_results: $1: no results of this machine yet; run ./run_baseline-rloo.sh first" >&2
    exit 2
  fi
fi
code=0
for machine in "$@"; do
  "$python" -m experiments.record "$machine" >/dev/null || code=$?
  "$python" -m visualization.report "$machine" || code=$?
done
exit "$code"
