#!/usr/bin/env bash
# One environment in .venv with the exact versions of requirements.lock, TRL as released among them, and with the command
# rloo-memory of this clone. Does nothing when it is up to date.
#
#   ./setup_env.sh                       set up (CUDA build of torch with an NVIDIA GPU, else the small CPU build)
#   ./setup_env.sh --use-system-torch    keep the torch that the system's Python already has
#   ./setup_env.sh --cpu                 or --cuda: that build of torch
#   PYTHON=python3.12 ./setup_env.sh     choose the Python (3.11 or newer)
#
# Where a set-up fails, the old .venv is there again. What pip says is in .build/setup_env.log.
set -euo pipefail
cd "$(dirname "$0")"
fail() { echo "setup_env: $1" >&2 && exit 2; }

system_torch=no quiet=no build=
for option in "$@"; do
  case "$option" in
    --use-system-torch) system_torch=yes ;;
    --cpu | --cuda) build=${option#--} ;;
    --quiet) quiet=yes ;;
    -h | --help) sed -n '2,10p' "$0" | cut -c3- && exit ;;
    *) fail "unknown option $option; see ./setup_env.sh --help" ;;
  esac
done

mkdir -p .build
log=.build/setup_env.log stamp=.venv/.stamp
exec 9>.build/setup_env.lock
flock -n 9 || { echo "environment: another set-up is at work here, waiting for its end" && flock 9; }
restore() { # the old environment, unless the new one is whole
  if [ -f "$stamp" ]; then rm -rf .venv.old; else rm -rf .venv; fi
  if [ -e .venv.old ]; then mv .venv.old .venv; fi
}
if [ -e .venv.old ]; then restore; fi # a set-up was killed

quietly() { "$@" >>"$log" 2>&1 </dev/null; }
pip_failed() { # PART
  fail "pip failed on $1 ($(grep '^ERROR' "$log" | tail -n 1)), its output: $log"
}
# An existing environment stays what it was made as: scripts that call this one need not know
lock=$(cksum <requirements.lock)
project=$(cksum <pyproject.toml)
install_project() { # rloo_memory, which stays in the clone
  quietly .venv/bin/python -m pip install --disable-pip-version-check --no-index --no-deps --no-build-isolation -e . ||
    pip_failed rloo-memory
  echo "$project" >.venv/.project
}
if grep -qsx "$lock" "$stamp" && { [ "$system_torch" = no ] || grep -q system-torch "$stamp"; }; then
  said="environment: up to date (.venv)"
  if [ "$(cat .venv/.project 2>/dev/null)" != "$project" ]; then
    : >"$log" && install_project
    said+=", with this clone's commands installed anew"
  fi
  [ "$quiet" = yes ] || echo "$said"
  exit 0
fi

if grep -qs system-torch "$stamp"; then system_torch=yes; fi
for python in ${PYTHON:-python3.12 python3.11 python3} ''; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python ./setup_env.sh"
torch=$(grep '^torch==' requirements.lock)
others="the other $(grep -v '^torch==' requirements.lock | grep -c '^[^#]') packages"
if [ -z "$build" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then build=cuda; else build=cpu; fi
fi

# The CPU build is a tenth of the size. PyPI does not hold it; PyTorch's own index does
get_torch() { # COMMAND...: run pip's install for torch
  local size="CPU build: 0.2 GB, one to three minutes" more=(--timeout 5 --retries 0 --extra-index-url)
  [ "$build" = cpu ] || size="CUDA build: several GB, five minutes or more"
  echo "  1 of 3: ${torch/==/ }, $size"
  if [ "$build" = cpu ]; then
    quietly "$@" "$torch+cpu" && return
    ! grep -q 'connection broken by' "$log" || pip_failed torch
    quietly "$@" "${more[@]}" https://download.pytorch.org/whl/cpu "$torch+cpu" && return
    echo "  no CPU build of torch for this Python here, taking PyPI's: several GB, five minutes or more"
  fi
  quietly "$@" "$torch" || pip_failed torch
}

: >"$log"
command -v git >/dev/null || fail "git is missing, which applies the patches in trl/: install it (apt-get install git)"
if [ "$system_torch" = yes ]; then
  torch_home=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) ||
    fail "--use-system-torch, but $python cannot import torch: install it there, or go without the option"
fi

echo "environment: setting up .venv with $("$python" --version); pip's output goes to $log"
trap restore EXIT
if [ -e .venv ]; then mv .venv .venv.old; fi
quietly "$python" -m venv .venv || fail "no venv: on Debian and Ubuntu apt-get install python3-venv; its output: $log"
pip=(.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off)
if [ "$system_torch" = yes ]; then
  # A path file, because --system-site-packages does not reach the torch of a Python that is itself an environment
  echo "  1 of 3: torch is the system's, in $torch_home"
  echo "$torch_home" >"$(echo .venv/lib/python3.*/site-packages)/system-torch.pth"
  pip+=(--no-deps) # the lock is complete; with dependencies pip would add torch
else
  get_torch "${pip[@]}"
fi
echo "  2 of 3: $others: 0.2 GB, about a minute"
grep -v '^torch==' requirements.lock >.venv/requirements.txt
quietly "${pip[@]}" -r .venv/requirements.txt || pip_failed "$others"
echo "  3 of 3: the trainers compared here, built from TRL's releases: seconds"
install_project
PYTHONPATH=. quietly .venv/bin/python -m experiments.builds || fail "$(tail -n 1 "$log")" # so that a run needs no network
printf '%s\n' "$lock" "$build" ${torch_home:+system-torch} >"$stamp"
echo "environment: ready"
[ "$build" = cpu ] || .venv/bin/python -m rloo_memory.cuda_check || true # says what keeps trainings from the GPU
