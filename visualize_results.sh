#!/usr/bin/env bash
# CSV -> charts and tables, for every machine folder under results/ (or the folders named).
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
if [ $# -eq 0 ]; then
  set -- results/*/
  [ -d "$1" ] || { echo "visualize_results: no results yet; run ./run_baseline-rloo.sh first" >&2; exit 2; }
fi
for machine in "$@"; do
  .venv/bin/python -m visualization.combine_memory_data "$machine"
  .venv/bin/python -m visualization.create_charts "$machine"
  .venv/bin/python -m visualization.tables "$machine"
done
