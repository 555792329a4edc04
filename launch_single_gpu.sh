#!/usr/bin/env bash
# Train on one GPU with a profile, no server:  MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb
# Settings that follow replace the profile's:  ./launch_single_gpu.sh constrained --max_steps 100
# MODEL_PATH: a folder, hub:owner/name (downloads it), or random:qwen3-0.6b (its shape, random weights).
# ./launch_single_gpu.sh --help lists profiles, settings, formats and outputs. Paths are those where you stand.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$here/.venv/bin/python
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
case " $* " in
  *" --help "* | *" -h "*) # needs nothing installed
    [ -x "$python" ] || python=python3
    exec "$python" -P -m experiments.launch.help ;;
esac
"$here/setup_env.sh" --quiet
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # less fragmentation on CUDA
exec "$python" -P -m experiments.launch "$@" # -P: a folder `experiments` where you stand is not taken for ours
