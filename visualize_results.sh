#!/usr/bin/env bash
# Usage: ./visualize_results.sh [results/MACHINE ...]
#
# Draws the charts and tables of the machine that it runs on, or of the folders named, from their runs as they are now.
# Writes results/MACHINE/: report.html, charts/*.png, charts/*.svg, charts/tables.md, summary.csv, combined_*.csv.
# Prints the peaks and what they mean. Exit code 1: a run folder is damaged; it is named, the others are drawn.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n 's/^# \{0,1\}//; 2,6p' "$0"
  exit 0
fi
cd "$(dirname "$0")"
if [ $# -eq 0 ] && [ ! -e .venv ]; then
  echo "visualize_results: nothing was run here yet; run ./run_baseline-rloo.sh first, or name results/MACHINE" >&2
  exit 2
fi
./setup_env.sh --quiet
if [ $# -eq 0 ]; then
  machine=$(.venv/bin/python -m experiments.device)
  set -- "results/$machine"
  [ -d "$1" ] || { echo "visualize_results: $1: no results of this machine yet; run ./run_baseline-rloo.sh first" >&2; exit 2; }
fi
code=0
for machine in "$@"; do
  .venv/bin/python -m experiments.record "$machine" >/dev/null || code=$?
  .venv/bin/python -m visualization.report "$machine" || code=$?
done
exit "$code"
