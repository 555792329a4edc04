#!/usr/bin/env bash
# The untouched trainers at k = 2, 4, 8. Options are passed on: ./run_baseline-rloo.sh --repeats 3 --k 2,4
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
exec .venv/bin/python -m experiments.suite --arms classic-baseline,stock,stock-accumulate "$@"
