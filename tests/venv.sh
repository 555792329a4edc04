#!/usr/bin/env bash
# tests/venv.sh NAME [PIP OPTION ...]: .venv-NAME, the packages of .venv and upon them pyproject.toml's group NAME. Made
# anew when what it is made of has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-$1
requirements=$(.venv/bin/python -c "import sys, tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups'][sys.argv[1]])" "$1")
stamp=$(cat requirements.lock "$0" <(echo "$@" "$requirements") | cksum)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; then exit; fi

echo "$venv: setting it up with $requirements"
packages() { "$1" -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }
rm -rf "$venv"
.venv/bin/python -m venv "$venv"
# Before pip looks: what .venv has in a version that serves is not installed again
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" >"$(packages "$venv/bin/python")/project.pth"
# shellcheck disable=SC2086 # several requirements are several words
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${@:2}" $requirements
echo "$stamp" >"$venv/.stamp"
