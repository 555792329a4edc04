#!/usr/bin/env bash
# Usage: ./visualize_results.sh [results/MACHINE ...]
#
# Draws the charts and tables of the machine that it runs on, or of the folders named, from their runs as they are now.
# Writes results/MACHINE/: report.html, charts/*.png, charts/*.svg, charts/tables.md, runs.jsonl, combined_*.csv.
# Prints the peaks, what they mean and where the page is.
# Paths are those where you stand. Runs come from ./run_baseline-rloo.sh, ./run_improve-rloo.sh and ./run_bench.sh.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
if [ $# -eq 0 ] && [ ! -e "$here/.venv" ]; then
  echo "visualize_results: nothing was run here yet; run ./run_baseline-rloo.sh first, or name results/MACHINE" >&2
  exit 2
fi
. "$here/experiments/start.sh"
if [ $# -eq 0 ]; then
  own=$("$python" -m experiments.suite --arms stock --print-folder)
  set -- "${own#"$PWD/"}"
  if [ ! -d "$1" ]; then
    echo "visualize_results: $1: no results of this machine yet; run ./run_baseline-rloo.sh first" >&2
    exit 2
  fi
fi
for machine in "$@"; do
  "$python" -m visualization.report "$machine" || worst=$?
done
exit "$worst"
