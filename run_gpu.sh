#!/usr/bin/env bash
# Usage: MINUTES=9 ./run_gpu.sh [--device cpu] [--results FOLDER] [--again] [NAME ...]
#
# Everything that only a GPU can show, the most telling first, or the named items alone. Begins nothing that MINUTES
# (100000) may be too short for; the same command goes on later. Writes results/GPU/ and, after every item and now and
# then within one, an archive: OUT=gpu_evidence.tar.gz beside this script. PYTHON=... is another environment than .venv,
# and nothing is installed. An item that failed is left alone until --again. Exit code 1: some item failed.
# --device cpu is a trial at small size. --list prints the items.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
fail() { echo "run_gpu.sh: $1" >&2 && exit 2; }

published=shared,classic-baseline,classic-string,classic-lean,stock,stock-accumulate,classic-string-exact
# Name, where (both, cuda, cpu), seconds that it may take (a guess for an H200), command. Those with a + go on by
# themselves where --minutes ended them
items() {
  cat << LIST
device              both   30  checks.device_facts
kernels             both   40  checks.kernels
exactness           both  220  checks.exactness
attention           cuda   60+ bench attention
cells-first         cuda  200+ bench cells-first
cells-k8            cuda  300+ bench cells-k8
published-k8        cuda   60+ suite --scale seed --arms $published --k 8
cells-ragged        cuda  150+ bench cells-ragged
cells-k32           cuda  400+ bench cells-k32
published-k2-k4     cuda   60+ suite --scale seed --arms $published --k 2,4
profile             cuda  120  bench.step_profile
cells-offload       cuda  150+ bench cells-offload
sampler             cuda   60+ bench sampler --models seed
planner             cuda   60+ checks.planner_check
cells-long          cuda  400+ bench cells-long
published-repeats   cuda   60+ suite --scale seed --arms $published --k 2,4,8 --repeats 3
published-large-k   cuda   60+ suite --scale seed --arms classic-string,classic-string-exact,classic-lean,shared --k 16,32,64
cells-8000          cuda  300+ bench cells-8000
attention           cpu    20+ bench attention --models 4/2-heads-of-16 --cells 40x8x2
cells-small         cpu    60+ bench cells-small
published-k2        cpu    20+ suite --scale test --arms shared,classic-lean --k 2
profile             cpu    30  bench.step_profile
sampler             cpu    60+ bench sampler --models test --repeats 1
planner             cpu    40+ checks.planner_check --cases shared-k8
LIST
}

device=cuda results=$here/results again=no names=' '
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;;
    --list) items && exit ;;
    --again) again=yes ;;
    --device | --results)
      [ $# -gt 1 ] || fail "$1 needs a value"
      declare "${1#--}=$2" && shift ;;
    *)
      grep -q "^$1 " < <(items) || fail "unknown item or option $1; see ./run_gpu.sh --help and --list"
      names+="$1 " ;;
  esac
  shift
done

[[ $device =~ ^(cuda|cpu)$ ]] || fail "--device $device is neither cuda nor cpu; choose the GPU by CUDA_VISIBLE_DEVICES"
[[ ${MINUTES:-0} =~ ^[0-9]+$ ]] || fail "MINUTES=$MINUTES is no whole number"
ends=$((${MINUTES:-100000} * 60 - 15)) # kept for ending an item and packing
out=$(readlink -f "${OUT:-$here/gpu_evidence.tar.gz}")
mkdir -p "$results" && results=$(readlink -f "$results")
[ -n "${PYTHON:-}" ] || "$here/setup_env.sh" --quiet
python=${PYTHON:-$here/.venv/bin/python}
export PYTHONSAFEPATH=1 SCRIPT_PID=$$ # a folder `experiments` where you stand is not ours; what is killed ends its item
assignments=$(PYTHONPATH=$here "$python" -m experiments.bench.on_gpu here --device "$device")
eval "$assignments"
states=$results/$MACHINE/on_gpu
mkdir -p "$states"

pack() { # raw samples and logs of runs stay behind where they are too much for one file
  archive && [ "$(($(wc -c < "$out.new") >> 20))" -lt 15 ] || archive --exclude=memory.csv --exclude=log.txt
  mv "$out.new" "$out"
}

archive() { # 1: a file has grown meanwhile
  tar -czf "$out.new" "$@" -C "$results" "$MACHINE" 2> /dev/null || [ $? -eq 1 ]
}

run_item() { # NAME SECONDS COMMAND...
  local name=$1 seconds=${2%+} code=0 ended='' left=$((ends - SECONDS)) known="$COMMIT ${*:3}"
  if is_known "$name.done"; then return; fi
  if [ "$again" = no ] && is_known "$name.failed"; then
    echo "$name: failed before, left alone (--again tries it)" && return
  fi
  if [ "$seconds" -gt "$left" ]; then
    echo "$name: not begun, may take $seconds s and $left s are left" && return
  fi
  echo "$name: begins, $left s are left"
  local words=("${@:3}" --device "$device" --results "$results" --machine "$MACHINE")
  case "$2" in *+) words+=(--minutes "$(printf %d.%03d $(((left - 45) / 60)) $(((left - 45) % 60 * 1000 / 60)))") ;; esac
  local begun=$SECONDS limit=$((4 * seconds + 600))
  case "$2" in *+) limit=$left ;; esac
  "$python" -m "experiments.${words[0]}" "${words[@]:1}" >> "$states/$name.log" 2>&1 < /dev/null &
  local item=$!
  while kill -0 $item 2> /dev/null && [ $((SECONDS - begun)) -lt $((left < limit ? left : limit)) ]; do
    sleep 1
    if [ $(((SECONDS - begun) % 20)) -eq 19 ]; then pack; fi
  done
  if kill -0 $item 2> /dev/null; then # an item that is late has failed, one that the minutes end goes on
    [ "$left" -le "$limit" ] && ended=5 || ended=124
    end $item
    echo "ended after $((SECONDS - begun)) s" >> "$states/$name.log"
  fi
  { wait $item || code=$?; } 2> /dev/null
  code=${ended:-$code}
  rm -f "$states/$name".{done,failed}
  local took="$((SECONDS - begun)) s" said
  said=$(tail -n 1 "$states/$name.log")
  case $code in
    0 | 4) echo "$known" > "$states/$name.done" ;; # 4: measured to the end, and not as it should be
    5 | 130 | 143) ;;
    *) echo "$known" > "$states/$name.failed" ;;
  esac
  case $code in
    0) echo "$name: done, $took" ;;
    4) echo "$name: done, $took, not as it should be: $said" ;;
    5 | 130 | 143) echo "$name: stopped after $took, the same command goes on" && stopped+="$name " ;;
    *) echo "$name: failed, $took: $said" ;;
  esac
  pack
}

is_known() { # whether this very code ended so; changed, uncommitted code is never the same
  [[ $COMMIT != *-dirty && $COMMIT != unknown && -f $states/$1 && $(cat "$states/$1") = "$known" ]]
}

end() { # some seconds to write a record, and no wait for what a driver does not let go
  kill "$1" 2> /dev/null || return 0
  for _ in 1 2 3 4 5 6 7 8; do kill -0 "$1" 2> /dev/null && sleep 1 || return 0; done
  kill -9 "$1" 2> /dev/null || true
}

run_all() { # NAMES between spaces, or a space alone for all
  while read -r name where seconds command; do
    case "$where" in both | "$device") ;; *) continue ;; esac
    [ "$1" = ' ' ] || [[ $1 = *" $name "* ]] || continue
    # shellcheck disable=SC2086 # a command is several words
    run_item "$name" "$seconds" $command
  done < <(items)
}

echo "$MACHINE, commit $COMMIT, $((ends - SECONDS)) s"
stopped=' '
run_all "$names"
once_more=$stopped
[ "$once_more" = ' ' ] || run_all "$once_more"
pack
echo "results: $results/$MACHINE, and all of it in $out"
echo "next, on the machine that keeps results: python -m experiments.bench.on_gpu unpack $out"
for name in $(items | cut -d' ' -f1 | sort -u); do
  known=$(cat "$states/$name.failed" 2> /dev/null) || continue
  [ "${known%% *}" != "$COMMIT" ] || { echo "failed: $name, see $states/$name.log" && worst=1; }
done
exit "${worst:-0}"
