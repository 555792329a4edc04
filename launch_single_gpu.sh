#!/usr/bin/env bash
# Train on one GPU with a profile, no server:  MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb
# Settings that follow replace the profile's:  ./launch_single_gpu.sh constrained --max_steps 100 --dataset my.jsonl
# MODEL_PATH: a folder, hub:owner/name (downloads it), or random:qwen3-0.6b (its shape, random weights).
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh --quiet
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # less fragmentation on CUDA
exec .venv/bin/python -m experiments.launch "$@"
