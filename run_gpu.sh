#!/usr/bin/env bash
# Everything that only a GPU can show, into results/<gpu> and one archive, the most telling first:
#     MINUTES=9 ./run_gpu.sh
# begins nothing new that nine minutes may be too short for, and the same command goes on later. OUT=... is the archive,
# PYTHON=... another environment than .venv, and nothing is installed. What follows goes to experiments.evidence.on_gpu run,
# such as --device cpu, a trial at small size, or --only cells-first.
set -euo pipefail
cd "$(dirname "$0")"
[ -n "${PYTHON:-}" ] || ./setup_env.sh --quiet
exec "${PYTHON:-.venv/bin/python}" -m experiments.evidence.on_gpu run \
  --minutes "${MINUTES:-100000}" --out "${OUT:-gpu_evidence.tar.gz}" "$@"
