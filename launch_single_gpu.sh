#!/usr/bin/env bash
# Set up if need be, then train on one GPU with a profile: rloo-memory launch of this clone, from wherever you stand.
#   MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb \
#     --dataset_name prompts.jsonl --reward_funcs rewards:short
# ./launch_single_gpu.sh --help lists profiles, settings, formats and outputs.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case " $* " in
  *" --help "* | *" -h "*) cd "$here" && exec python3 -m rloo_memory.launch.help ;; # needs nothing installed
esac
"$here/setup_env.sh" --quiet
exec "$here/.venv/bin/rloo-memory" launch "$@"
