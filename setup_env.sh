#!/usr/bin/env bash
# One environment in .venv with the exact versions of requirements.lock. Does nothing when it is up to date.
#
#   ./setup_env.sh                       set up (CUDA build of torch with an NVIDIA GPU, else the small CPU build)
#   ./setup_env.sh --use-system-torch    keep the torch that the system's Python already has
#   ./setup_env.sh --download DIR        fetch everything to DIR, for a machine without network  [--cpu | --cuda]
#   ./setup_env.sh --offline DIR         set up from DIR, no network
#   PYTHON=python3.12 ./setup_env.sh     choose the Python (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")"

mode=online dir= system_torch=no quiet=no build=
while [ $# -gt 0 ]; do
  case "$1" in
    --use-system-torch) system_torch=yes ;;
    --download | --offline)
      mode=${1#--}
      [ $# -gt 1 ] || { echo "setup_env: $1 needs a folder" >&2; exit 2; }
      dir=$2
      shift ;;
    --cpu | --cuda) build=${1#--} ;;
    --quiet) quiet=yes ;;
    -h | --help) sed -n '2,9p' "$0" | cut -c3-; exit 0 ;;
    *) echo "setup_env: unknown option $1; see ./setup_env.sh --help" >&2; exit 2 ;;
  esac
  shift
done

find_python() {
  for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup_env: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python ./setup_env.sh" >&2
  exit 2
}

# An existing environment stays what it was made as: scripts that call this one need not know.
stamp=.venv/.stamp
lock=$(cat requirements.lock setup_env.sh | cksum)
if [ "$mode" != download ] && [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$lock" ]; then
  if [ "$system_torch" = no ] || grep -q system-torch "$stamp"; then
    [ "$quiet" = yes ] || echo "environment: up to date (.venv)"
    exit 0
  fi
fi
[ -f "$stamp" ] && grep -q system-torch "$stamp" && system_torch=yes

python=$(find_python)
torch=$(grep '^torch==' requirements.lock)
if [ -z "$build" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then build=cuda; else build=cpu; fi
fi
cpu_index=https://download.pytorch.org/whl/cpu

# The CPU build is a tenth of the size. PyPI does not hold it; PyTorch's own index does.
get_torch() { # get_torch COMMAND...: run pip's install or download for torch
  if [ "$build" = cuda ]; then
    "$@" "$torch"
  else
    "$@" "$torch+cpu" 2>/dev/null || "$@" --timeout 5 --retries 0 --extra-index-url "$cpu_index" "$torch+cpu" 2>/dev/null ||
      { echo "environment: no CPU build of torch for this Python here, taking PyPI's build"; "$@" "$torch"; }
  fi
}

if [ "$mode" = download ]; then
  mkdir -p "$dir"
  echo "downloading for $($python --version), $build build of torch, to $dir"
  get_torch "$python" -m pip download --quiet --dest "$dir"
  "$python" -m pip download --quiet --dest "$dir" --find-links "$dir" -r requirements.lock
  "$python" -m pip download --quiet --dest "$dir" --no-deps trl==0.21.0
  "$python" -m pip download --quiet --dest "$dir" pip setuptools wheel
  echo "done; on the other machine, with the same Python: ./setup_env.sh --offline $dir"
  exit 0
fi

echo "environment: setting up .venv with $($python --version) ($build build of torch); this takes a few minutes"
rm -rf .venv
"$python" -m venv .venv
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
if [ "$mode" = offline ]; then
  [ -d "$dir" ] || { echo "setup_env: no folder $dir; fill it with --download on a machine with network" >&2; exit 2; }
  install+=(--no-index --find-links "$dir")
  export FORK_WHEELS=$dir
fi
if [ "$system_torch" = yes ]; then
  # A path file, because --system-site-packages does not reach the torch of a Python that is itself an environment
  torch_home=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) ||
    { echo "setup_env: --use-system-torch, but $python cannot import torch" >&2; exit 2; }
  echo "$torch_home" > "$(echo .venv/lib/python3.*/site-packages)/system-torch.pth"
  grep -v '^torch==' requirements.lock > .venv/requirements.txt
  "${install[@]}" --no-deps -r .venv/requirements.txt # the lock is complete; with dependencies pip would add torch
else
  if [ "$mode" = offline ]; then "${install[@]}" "$torch"; else get_torch "${install[@]}"; fi
  "${install[@]}" -r requirements.lock
fi
for patch in "" $(grep -v '^#' trl/classic/series); do # the arms' TRL, so that a run needs no network
  name=${patch%.patch}
  .venv/bin/python trl/fork.py build classic ".build/fork/${name:-classic-untouched}" \
    $([ -n "$patch" ] && echo "--patches $patch" || echo --no-patches) >/dev/null
done
.venv/bin/python trl/fork.py build current .build/fork/current-untouched --no-patches >/dev/null
{ echo "$lock"; echo "$build"; if [ "$system_torch" = yes ]; then echo system-torch; fi; } > "$stamp"
echo "environment: ready"
