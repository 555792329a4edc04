#!/usr/bin/env bash
# Usage: MINUTES=9 ./run_gpu.sh [OPTION ...]
#
# Everything that only a GPU can show, the most telling first. Begins nothing that MINUTES (100000) may be too short
# for; the same command goes on later. Writes results/GPU/ and one archive, OUT=gpu_evidence.tar.gz beside this script.
# PYTHON=... is another environment than .venv, and nothing is installed. Exit code 1: some item failed.
# Options: --device cpu (a trial at small size) --only cells-first,kernels --again kernels --results FOLDER
# Paths are those where you stand. All options: .venv/bin/python -m experiments.evidence.on_gpu run --help
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case " $* " in *" --help "* | *" -h "*) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
[ -n "${PYTHON:-}" ] || "$here/setup_env.sh" --quiet
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # a folder `experiments` where you stand is not ours
code=0
"${PYTHON:-$here/.venv/bin/python}" -m experiments.evidence.on_gpu run \
  --minutes "${MINUTES:-100000}" --out "${OUT:-$here/gpu_evidence.tar.gz}" "$@" || code=$?
[ "$code" -le 1 ] || exit "$code"
echo "next, on the machine that keeps results: .venv/bin/python -m experiments.evidence.on_gpu unpack ARCHIVE"
exit "$code"
