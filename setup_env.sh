#!/usr/bin/env bash
# One environment in .venv with the exact versions of requirements.lock, with the fork of this clone as its `trl`, and with
# the command rloo-memory. Does nothing when it is up to date; where the fork alone has changed, installs that anew.
#
#   ./setup_env.sh                       set up (CUDA build of torch with an NVIDIA GPU, else the small CPU build)
#   ./setup_env.sh --use-system-torch    keep the torch that the system's Python already has
#   ./setup_env.sh --download DIR        fetch everything to DIR, for a machine without network  [--cpu | --cuda]
#   ./setup_env.sh --offline DIR         set up from DIR, no network
#   PYTHON=python3.12 ./setup_env.sh     choose the Python (3.11 or newer)
#
# An old .venv stays in use until the new one is complete. What pip says is in .build/setup_env.log.
set -euo pipefail
started_in=$PWD
cd "$(dirname "$0")"

fail() { # MESSAGE [EXIT CODE]
  echo "setup_env: $1" >&2
  exit "${2:-2}"
}

mode=online dir= system_torch=no quiet=no build=
while [ $# -gt 0 ]; do
  case "$1" in
    --use-system-torch) system_torch=yes ;;
    --download | --offline)
      mode=${1#--}
      [ $# -gt 1 ] || fail "$1 needs a folder"
      dir=$(cd "$started_in" && realpath -m -- "$2")
      shift ;;
    --cpu | --cuda) build=${1#--} ;;
    --quiet) quiet=yes ;;
    -h | --help) sed -n '2,11p' "$0" | cut -c3-; exit 0 ;;
    *) fail "unknown option $1; see ./setup_env.sh --help" ;;
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
  fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python ./setup_env.sh"
}

# An existing environment stays what it was made as: scripts that call this one need not know.
stamp=.venv/.stamp
lock=$(cat requirements.lock setup_env.sh | cksum)
fork=$(find trl pyproject.toml -type f ! -path '*/__pycache__/*' ! -path '*/.*' -print0 | LC_ALL=C sort -z | xargs -0 cat | cksum)
packages_are_there() {
  [ "$mode" != download ] && [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$lock" ] || return 1
  [ "$system_torch" = no ] || grep -q system-torch "$stamp"
}
stop_if_up_to_date() {
  packages_are_there && [ "$(cat .venv/.fork 2>/dev/null)" = "$fork" ] || return 0
  [ "$quiet" = yes ] || echo "environment: up to date (.venv)"
  exit 0
}
stop_if_up_to_date

mkdir -p .build
exec 9>.build/setup_env.lock # held by what runs below, too: a pip that outlives a killed set-up is waited for
if command -v flock >/dev/null && ! flock -n 9; then
  echo "environment: another set-up is at work here, waiting for its end"
  flock 9
fi

# The new environment is made in .venv.new, and two renames put it in the old one's place. The old one is whole and in
# its place throughout, whatever ends this script; only between the two renames does it stand aside, as .venv.old.
recover() {
  if [ -e .venv.old ] && [ ! -e .venv ] && [ ! -L .venv ]; then mv -T .venv.old .venv; fi
  rm -rf .venv.new .venv.old
}
child=
end() {
  trap - EXIT
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  recover
}
interrupted() {
  echo "setup_env: interrupted; $unchanged" >&2
  exit "$1"
}
recover
stop_if_up_to_date # another set-up may have done it meanwhile
if [ -e .venv ]; then unchanged=".venv is as it was"; else unchanged="nothing is set up"; fi
trap end EXIT
trap 'interrupted 129' HUP
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

log=.build/setup_env.log
: >"$log"
quietly() { # COMMAND...: its output goes to the log. In the background: a signal would have to wait for its end else
  before=$(wc -l <"$log")
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  local code=0
  wait "$child" || code=$?
  child=
  return "$code"
}
said() { tail -n "+$((before + 1))" "$log"; } # what the last command printed
unreachable() { grep -q 'connection broken by' <(said); }
pip_failed() { # PART: one line with the remedy
  local error
  error=$(said | grep '^ERROR' | tail -n 1) || error="ERROR: it said nothing"
  error=${error#ERROR: }
  local fetch="./setup_env.sh --download" problem="pip failed on $1 ($error)"
  if [ "$mode" = offline ]; then
    problem="$dir does not serve for $1 ($error): $fetch $dir on a machine with network and $version fills it"
  elif unreachable; then
    problem="no network for $1: connect, or $fetch DIR where there is one and ./setup_env.sh --offline DIR here"
  fi
  fail "$problem; $unchanged; pip's output: $log" 1
}

install_fork() { # ENVIRONMENT: the fork as its `trl`, and this clone's rloo_memory, which stays in the clone
  rm -rf .build/wheel
  quietly "$1/bin/python" trl/fork.py wheel current .build/wheel || fail "$(said | tail -n 1); $unchanged" 1
  quietly "$1/bin/python" -m pip install --disable-pip-version-check --no-index --no-deps .build/wheel/*.whl ||
    pip_failed "the fork's wheel"
  quietly "$1/bin/python" -m pip install --disable-pip-version-check --no-index --no-deps --no-build-isolation -e . ||
    pip_failed rloo-memory
  echo "$fork" >"$1/.fork"
}
if packages_are_there; then
  install_fork .venv
  [ "$quiet" = yes ] || echo "environment: up to date (.venv), with this clone's fork installed anew"
  exit 0
fi

[ -f "$stamp" ] && grep -q system-torch "$stamp" && system_torch=yes
python=$(find_python)
version=$("$python" --version)
torch=$(grep '^torch==' requirements.lock)
others="the other $(grep -c '^[^#]' <(grep -v '^torch==' requirements.lock)) packages"
if [ -z "$build" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then build=cuda; else build=cpu; fi
fi
size="CPU build: 0.2 GB, one to three minutes"
[ "$build" = cpu ] || size="CUDA build: several GB, five minutes or more"
cpu_index=https://download.pytorch.org/whl/cpu

# The CPU build is a tenth of the size. PyPI does not hold it; PyTorch's own index does.
get_torch() { # COMMAND...: run pip's install or download for torch
  if [ "$build" = cuda ] || [ "$mode" = offline ]; then
    quietly "$@" "$torch"
  else
    quietly "$@" "$torch+cpu" && return
    ! unreachable || return 1
    quietly "$@" --timeout 5 --retries 0 --extra-index-url "$cpu_index" "$torch+cpu" && return
    echo "  no CPU build of torch for this Python here, taking PyPI's: several GB, five minutes or more"
    quietly "$@" "$torch"
  fi
}

if [ "$mode" = download ]; then
  unchanged="what is there already is kept"
  mkdir -p "$dir" || fail "cannot write to $dir; name another folder"
  download=("$python" -m pip download --disable-pip-version-check --progress-bar off --dest "$dir")
  echo "environment: downloading to $dir for $version"
  echo "  1 of 3: ${torch/==/ }, $size"
  get_torch "${download[@]}" || pip_failed torch
  echo "  2 of 3: $others: 0.2 GB, about a minute"
  quietly "${download[@]}" --find-links "$dir" -r requirements.lock || pip_failed "$others"
  echo "  3 of 3: TRL 0.21: seconds"
  quietly "${download[@]}" --no-deps trl==0.21.0 || pip_failed "TRL 0.21"
  echo "done; on the other machine, with the same Python: ./setup_env.sh --offline $dir"
  exit 0
fi

[ "$mode" = online ] || [ -d "$dir" ] || fail "no folder $dir; fill it with --download on a machine with network"
command -v git >/dev/null || fail "git is missing, which applies the patches in trl/: install it (apt-get install git)"
if [ "$system_torch" = yes ]; then
  torch_home=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) ||
    fail "--use-system-torch, but $python cannot import torch: install it there, or go without the option"
fi

echo "environment: setting up .venv with $version; pip's output goes to $log"
new=.venv.new
quietly "$python" -m venv --prompt .venv "$new" ||
  fail "$python -m venv failed: on Debian and Ubuntu apt-get install python3-venv; $unchanged; its output: $log" 1
install=("$new/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
if [ "$mode" = offline ]; then
  install+=(--no-index --find-links "$dir")
  export FORK_WHEELS=$dir
fi
if [ "$system_torch" = yes ]; then
  # A path file, because --system-site-packages does not reach the torch of a Python that is itself an environment
  echo "  1 of 3: torch is the system's, in $torch_home"
  echo "$torch_home" >"$(echo "$new"/lib/python3.*/site-packages)/system-torch.pth"
  grep -v '^torch==' requirements.lock >"$new/requirements.txt"
  needs=(--no-deps -r "$new/requirements.txt") # the lock is complete; with dependencies pip would add torch
else
  echo "  1 of 3: ${torch/==/ }, $size"
  get_torch "${install[@]}" || pip_failed torch
  needs=(-r requirements.lock)
fi
echo "  2 of 3: $others: 0.2 GB, about a minute"
quietly "${install[@]}" "${needs[@]}" || pip_failed "$others"
echo "  3 of 3: the trainers compared here, built from TRL's releases: seconds"
fork() { # ARGUMENTS of trl/fork.py build
  quietly "$new/bin/python" trl/fork.py build "$@" || fail "$(said | tail -n 1); $unchanged" 1
}
for patch in "" $(grep -v '^#' trl/classic/series); do # the arms' TRL, so that a run needs no network
  name=${patch%.patch}
  if [ -n "$patch" ]; then choice=(--patches "$patch"); else choice=(--no-patches); fi
  fork classic ".build/fork/${name:-classic-untouched}" "${choice[@]}"
done
fork current .build/fork/current-untouched --no-patches
install_fork "$new"
{ echo "$lock"; echo "$build"; if [ "$system_torch" = yes ]; then echo system-torch; fi; } >"$new/.stamp"

# The scripts in bin/ name the folder that they were installed in
"$python" - "$new" .venv 2>>"$log" <<'EOF' || fail "cannot change the scripts in $new/bin: $unchanged; see $log" 1
import os
import sys
from pathlib import Path

made, final = (os.fsencode(os.path.abspath(path)) for path in sys.argv[1:])
for path in [Path(sys.argv[1], "pyvenv.cfg"), *Path(sys.argv[1], "bin").iterdir()]:
    if path.is_file() and not path.is_symlink() and made in path.read_bytes():
        path.write_bytes(path.read_bytes().replace(made, final))
EOF
if [ -e .venv ] || [ -L .venv ]; then mv -T .venv .venv.old; fi
mv -T "$new" .venv
echo "environment: ready"
[ "$build" = cpu ] || .venv/bin/python -m rloo_memory.cuda_check || true # says what keeps trainings from the GPU
