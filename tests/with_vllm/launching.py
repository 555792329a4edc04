"""Runs the launcher with a profile that has vLLM, on a CPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from small_profile import small_profile

ROOT = Path(__file__).resolve().parents[2]
PROFILE = small_profile(
    4, 8, algorithm="grpo", use_vllm=True, vllm_max_model_length=512, prefix_sharing=True,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, save_strategy="steps", save_steps=2,
    prompt_tokens=48, logging_steps=1, learning_rate=1e-3,
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(model: Path, folder: Path, *settings: str) -> subprocess.Popen:
    """Its output goes to `folder`/out, what it prints to `folder`/said."""
    (folder / "profile.yaml").write_text(PROFILE)
    program = [sys.executable, str(Path(__file__).with_name("launch_on_cpu.py")), str(folder / "profile.yaml")]
    command = [*program, "--output_dir", str(folder / "out"), *settings]
    environment = os.environ | {"MODEL_PATH": str(model), "PYTHONPATH": str(ROOT)}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)


def launch(model: Path, folder: Path, *settings: str) -> tuple[int, str]:
    """(exit code, what it printed)."""
    code = start(model, folder, *settings).wait(300)
    return code, (folder / "said").read_text()


def check_trained(code: int, said: str, folder: Path) -> None:
    assert code == 0, said[-3000:]
    record = json.loads((folder / "memory.json").read_text())
    assert {"generate", "score", "train", "optimizer"} <= set(record["peaks"]) and record["settings"]["use_vllm"]
    log = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    # the second rollout is one of new weights
    assert log[1]["sampling/sampling_logp_difference/max"] < 1e-4 and log[0]["grad_norm"] > 0
    assert (folder / "model.safetensors").exists()
