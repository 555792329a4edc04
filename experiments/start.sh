# Sourced by the scripts at the root, which say where they lie in `here`: answers --help with the script's first comment,
# sets up, and gives it `python`, `suite` and `worst`, the exit code so far.
case " $* " in *" --help "* | *" -h "*) sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "${BASH_SOURCE[-1]}" && exit ;; esac
"$here/setup_env.sh" --quiet
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # a folder `experiments` where you stand is not ours
python=$here/.venv/bin/python worst=0

suite() { # after failed runs the next suite begins all the same; not after a bad option (2) or a signal (128 + n)
  SCRIPT_PID=$$ "$python" -m experiments.suite "$@" || worst=$?
  case "$worst" in 0 | 1 | 5) ;; *) exit "$worst" ;; esac
}
