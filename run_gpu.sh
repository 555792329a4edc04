#!/usr/bin/env bash
# Usage: MINUTES=9 ./run_gpu.sh [--device cpu] [--results FOLDER] [--list] [--pack] [NAME ...]
#
# Everything that only a GPU can show, the most telling first, or the named items alone. Begins nothing that MINUTES
# (100000) are too short for; the same command goes on later. Writes results/GPU/ and, now and then and at its end, an
# archive: OUT=gpu_evidence.tar.gz beside this script. An item that failed is left alone unless it is named. Exit code
# 1: some item failed. --device cpu is a trial at small size, --list prints the items.
# --pack makes gpu_program.tar.gz for a machine without network, git or pip: this project, every TRL, packages that such
# a machine lacks (PACKAGES, for Python VERSION=3.12). PYTHON=python3 ./run_gpu.sh runs it there, with the torch of that
# Python. At home: tar -xzf gpu_evidence.tar.gz -C results
set -euo pipefail
cells='bench cells-gpu --models' small=qwen3-0.6b large=qwen3-8b-lora
seed='suite --scale seed --arms' arms=shared,classic-baseline,classic-string,classic-lean,stock,stock-accumulate
near=stock,stock-cudnn,shared-2,shared-8192 far=stock,stock-accumulate,shared-2,shared-micro-2
# Name, minutes that must be left, minutes after which it has failed (guesses for an H200), command. All but the first
# keep what they measured when they are ended
items_cuda="
exactness          4  20 checks.exactness
cells-first        2  30 $cells $small/sampled --cells 3000x100x8
cells-8b           3  30 $cells $large/sampled --cells 3000x100x8 --repeats 2
tree               3  30 bench alike --models $small/2000 --cells 2200x200x8 --repeats 2
published-k8       1  30 $seed $arms --k 8
cells-long         3  40 $cells $small/given,$large/given --cells 1000x2000x8 --repeats 2
cells-ragged       3  40 $cells $small/ragged,$large/ragged --cells 3000x100x8,1000x2000x8 --ways $near --repeats 2
cells-k32          4  40 $cells $small/sampled,$large/sampled --cells 3000x100x32 --ways $far --repeats 1
planner            1  40 checks.planner_check
published-k2-k4    1  60 $seed $arms --k 2,4
published-exact    1  20 $seed classic-string-exact --k 2,4,8
cells-8000         4  60 $cells $small/sampled,$large/sampled --cells 8000x512x8 --ways $far --repeats 1
published-repeats  1 120 $seed $arms,classic-string-exact --k 2,4,8 --repeats 3
published-many     1  60 $seed classic-string,classic-string-exact,classic-lean,shared --k 16,32,64"
items_cpu="
cells-small       1   5 bench cells-small --ways stock,shared-2
published-k2      1   5 suite --scale test --arms shared,classic-lean --k 2
planner           1   5 checks.planner_check --cases shared-k8"
needed=(torch transformers accelerate peft datasets pandas pyarrow xxhash psutil pynvml)

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
fail() { echo "run_gpu.sh: $1" >&2 && exit 2; }

pack_program() {
  cd "$here"
  [ -z "$(git status --porcelain)" ] || fail "something is not committed, and its figures would be of no commit"
  ./setup_env.sh --quiet
  rm -rf .gpu && mkdir -p .gpu
  .venv/bin/python -m experiments.builds
  .venv/bin/python -c 'from experiments import commit; print(commit.source_commit())' > .gpu/commit
  cp -r .build/fork .gpu/fork
  pinned=$(grep -E "^(${PACKAGES:-datasets|dill|multiprocess|peft|transformers})==" requirements.lock)
  # shellcheck disable=SC2086 # one word a package
  .venv/bin/python -m pip install -q --no-deps --target .gpu/site --only-binary=:all: --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --python-version "${VERSION:-3.12}" $pinned
  git ls-files -z | tar -czf gpu_program.tar.gz --exclude=__pycache__ --transform 's,^,rloo-memory/,' --null -T - .gpu
  du -h gpu_program.tar.gz
}

device=cuda results=$here/results names=' '
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;;
    --list) echo "$items_cuda" && exit ;;
    --pack) pack_program && exit ;;
    --device | --results) [ $# -gt 1 ] || fail "$1 needs a value"
      declare "${1#--}=$2" && shift ;;
    *) names+="$1 " ;;
  esac
  shift
done
case "$device" in cuda) items=$items_cuda ;; cpu) items=$items_cpu ;; *)
  fail "--device $device is neither cuda nor cpu; choose the GPU by CUDA_VISIBLE_DEVICES" ;;
esac
for name in $names; do
  grep -q "^$name " <<< "$items" || fail "unknown item or option $name; see ./run_gpu.sh --help and --list"
done
[[ ${MINUTES:-0} =~ ^[0-9]+$ ]] || fail "MINUTES=$MINUTES is no whole number"
ends=$((10#${MINUTES:-100000} * 60 - 20)) # kept for ending an item and packing
out=$(readlink -f "${OUT:-$here/gpu_evidence.tar.gz}")

# Every measurement has the same environment; an arm that has cuDNN's attention first asks for it
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1
paths=$here
if [ -z "${PYTHON:-}" ]; then
  "$here/setup_env.sh" --quiet
elif [ -d "$here/.gpu" ]; then
  paths+=:$here/.gpu/site
  SOURCE_COMMIT=$(< "$here/.gpu/commit") && export SOURCE_COMMIT
  mkdir -p "$here/.build" && cp -r "$here/.gpu/fork" "$here/.build/"
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-$here/.venv/bin/python}
missing=$("$python" -c 'import sys, importlib.util
print(*[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])' "${needed[@]}")
[ -z "$missing" ] || fail "not installed for $python: $missing; bring them along: PACKAGES='datasets|...' ./run_gpu.sh --pack"
if [ "$device" = cuda ]; then # some virtual machines do not let memory be mapped so
  segments=expandable_segments:True try='import torch; torch.ones(2**26, device="cuda").sum().item()'
  if PYTORCH_ALLOC_CONF=$segments "$python" -c "$try" 2> /dev/null; then export PYTORCH_ALLOC_CONF=$segments; fi
fi
folder=$("$python" -m experiments.suite --arms shared --k 2 --device "$device" --results "$results" --print-folder)
commit=$("$python" -c 'from experiments import commit; print(commit.source_commit())')
states=$folder/on_gpu item='' worst=0
mkdir -p "$states"
timeout 60 "$python" -m torch.utils.collect_env > "$states/device.txt" 2>&1 || true

pack() { # raw samples stay behind where they are too much for one file to carry
  local new=$out.$BASHPID
  archive "$new" && [ "$(wc -c < "$new")" -lt 15000000 ] || archive "$new" --exclude=memory.csv
  mv "$new" "$out"
}

archive() { # 1: a file has grown meanwhile
  tar -czf "$@" -C "$(dirname "$folder")" "$(basename "$folder")" 2> /dev/null || [ $? -eq 1 ]
}

stop() { # what is ended writes its own end, and then is in the archive, too
  kill "$packer" 2> /dev/null || true
  if [ -n "$item" ]; then kill "$item" && wait "$item" || true; fi
  pack
}

run_item() { # NAME MINUTES-LEFT MINUTES-AT-MOST COMMAND...
  local name=$1 left=$((ends - SECONDS)) limit=$(($3 * 60)) code=0 begun=$SECONDS how known="$commit ${*:4}"
  if [[ $known != unknown* && $known != *-dirty\ * ]]; then # changed, uncommitted code is never the same
    if [ "$(cat "$states/$name.done" 2> /dev/null)" = "$known" ]; then echo "$name: there" && return; fi
    if [ "$names" = ' ' ] && [ "$(cat "$states/$name.failed" 2> /dev/null)" = "$known" ]; then
      echo "$name: failed before; ./run_gpu.sh $name tries it again" && worst=1 && return
    fi
  fi
  if [ $(($2 * 60)) -gt $left ]; then echo "$name: not begun, $left s are left" && return; fi
  echo "$name: begins, $left s are left"
  timeout -k 10 $((left < limit ? left : limit)) "$python" -m "experiments.$4" "${@:5}" --device "$device" \
    --results "$(dirname "$folder")" --machine "$(basename "$folder")" >> "$states/$name.log" 2>&1 < /dev/null &
  item=$!
  wait $item || code=$?
  item=''
  rm -f "$states/$name".{done,failed}
  if [ $code -eq 124 ] || [ $code -eq 137 ]; then code=$((left < limit ? 5 : 124)); fi
  case $code in
    0 | 4) echo "$known" > "$states/$name.done" ;; # 4: measured to the end, and not as it should be
    5) ;;
    *) echo "$known" > "$states/$name.failed" && worst=1 ;;
  esac
  case $code in 0) how=done ;; 4) how='done, not as it should be' ;; 5) how='stopped, the same command goes on' ;; *) how=failed ;; esac
  echo "$name: $how, $((SECONDS - begun)) s: $(tail -n 1 "$states/$name.log")"
  pack
}

while sleep 20 && kill -0 $$ 2> /dev/null; do pack; done > /dev/null 2>&1 &
packer=$!
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
echo "$(basename "$folder"), commit $commit, $((ends - SECONDS)) s"
while read -r name least most command; do
  if [ -z "$name" ] || { [ "$names" != ' ' ] && [[ $names != *" $name "* ]]; }; then continue; fi
  # shellcheck disable=SC2086 # a command is several words
  run_item "$name" "$least" "$most" $command
done <<< "$items"
echo "results: $folder, and all of it in $out"
exit $worst
