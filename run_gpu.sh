#!/usr/bin/env bash
# Everything that only a GPU can show, into results/<gpu>, the most telling first. What one commit has finished is not
# repeated, so
#     MINUTES=9 ./run_gpu.sh
# begins nothing new after nine minutes, and the same command goes on later. RESULTS=... is another folder than results.
# PYTHON=... is another environment than .venv, and nothing is installed. Without a GPU: DEVICE=cpu SCALES=... KS=...
# A part that fails does not stop the others; the last line names those that failed, and the exit code is 1.
set -euo pipefail
cd "$(dirname "$0")"
[ -n "${PYTHON:-}" ] || ./setup_env.sh --quiet
python=${PYTHON:-.venv/bin/python}
device=${DEVICE:-cuda} ks=${KS:-8,16,32} results=${RESULTS:-results}
end=$(($(date +%s) + ${MINUTES:-100000} * 60))
failed=()

minutes_left() { echo $(((end - $(date +%s)) / 60)); }

step() { # title, command...: skipped when time is up
  if [ "$(minutes_left)" -le 0 ]; then
    echo "not begun: $1 (the same command goes on later)"
    return
  fi
  echo "== $1"
  "${@:2}" || {
    echo "== $1: exit code $?"
    failed+=("$1")
  }
}

suite() { step "$1 k=$3" "$python" -m experiments.suite --device "$device" --results "$results" \
  --minutes "$(minutes_left)" --scale "$1" --arms "$2" --k "$3" --repeats "$4"; }

step exactness "$python" -m experiments.evidence.exactness --device "$device" --results "$results"
today=stock,stock-accumulate,shared
for scale in ${SCALES:-qwen3-0.6b-p3000-c100 qwen3-8b-lora-p3000-c512}; do suite "$scale" $today "$ks" 1; done
if [ -z "${SCALES:-}" ]; then
  suite seed classic-baseline,classic-string,classic-string-exact,classic-lean,$today 2,4,8 3
  suite seed classic-string,classic-string-exact,classic-lean,shared 16,32,64 1
fi
step sampler "$python" -m experiments.evidence.sampler_check --device "$device" --results "$results" \
  ${SCALES:+--scale "${SCALES%% *}" --k "${ks%%,*}"}
[ -n "${SCALES:-}" ] || step plan "$python" -m experiments.evidence.planner_check --device "$device" --results "$results"
if [ -z "${SCALES:-}" ]; then
  for model in qwen3-0.6b qwen3-1.7b qwen3-8b-lora; do
    for lengths in p3000-c100 p3000-c512 p1000-c100 p1000-c512 p8000-c100 p8000-c512; do
      suite "$model-$lengths" $today 8,16,32 1
    done
  done
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf -v names '%s; ' "${failed[@]}"
  echo "failed: ${names%; }"
  exit 1
fi
