"""The launcher under `accelerate launch` with the files in settings/accelerate: two processes on the CPU (gloo)."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import two_processes
from safetensors.torch import load_file
from small_profile import small_profile

pytestmark = pytest.mark.slow
PROGRAM = ("-m", "rloo_memory.launch")
FSDP_PROGRAM = ("tests/probes/fsdp_on_cpu.py",)  # the launcher where accelerate can shard on CPU
# Two rollouts with two updates each: after the first update of a rollout the loss is not zero
PROFILE = small_profile(
    4, 8, beta=0.05, prefix_sharing=True, tokens_per_forward=18, num_iterations=2, max_steps=4, prompt_tokens=48,
    gradient_checkpointing=True, optim="adamw_torch_fused", learning_rate=1e-3, logging_steps=1,
    save_strategy="steps", save_steps=4, predict_memory=False, seed=3,
)  # fmt: skip


def check(setups, model, folder):
    """Trains with each of (file, program), DDP first, and compares with DDP. Nothing is told about the CPU: the
    launcher sees that there is no GPU."""
    (folder / "profile.yaml").write_text(PROFILE)
    before, weights = load_file(Path(model) / "model.safetensors"), {}
    total = sum(tensor.numel() for tensor in before.values())
    for config, program in setups:
        out, environment = folder / config, {"MODEL_PATH": model, "DS_ACCELERATOR": "cpu"}
        words = (folder / "profile.yaml", "--output_dir", out)
        # DeepSpeed compiles its Adam for the host once, in some minutes
        code, said = two_processes.launched(config, program, *words, seconds=600, **environment)
        assert code == 0, f"{config}: exit code {code}\n{said[-4000:]}"
        assert said.count("memory by phase:") == said.count("\nreward  letters ") == 1
        weights[config] = load_file(out / "model.safetensors")  # whole, also where checkpoints are shards
        if program == FSDP_PROGRAM:
            assert json.loads((out / "sharding.json").read_text()) == {"policy": True, "reference": True}, config
        devices = {"num_devices": 2, "fully_sharded": "fsdp" in config, "offload_parameters": "offload" in config}
        devices["zero_stage"] = 3 if "zero3" in config else 0
        for suffix in ("", ".1"):  # each process has its own record
            record = json.loads((out / f"memory{suffix}.json").read_text())
            assert record["devices"].items() >= devices.items()
            assert record["parameters"] == record["trained_parameters"] == total  # all, not a share
    for config, _ in setups[1:]:
        for name, expected in weights["ddp"].items():
            moved = (expected - before[name]).norm()
            assert moved > 1e-3 * before[name].norm(), f"{name} was not trained"
            assert (weights[config][name] - expected).norm() < 1e-3 * moved, (config, name)


def test_ddp_fsdp2_and_offloading_train_the_same_numbers(policy, tmp_path):
    check([("ddp", PROGRAM), ("fsdp2", FSDP_PROGRAM), ("fsdp2_offload", FSDP_PROGRAM)], policy, tmp_path)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not here: make test-deepspeed")
def test_ddp_and_zero3_train_the_same_numbers(policy, tmp_path):
    check([(config, PROGRAM) for config in ("ddp", "zero3", "zero3_offload")], policy, tmp_path)


def test_fsdp_without_a_gpu_is_refused(policy, tmp_path):
    """Accelerate would not shard there, and not say so."""
    (tmp_path / "profile.yaml").write_text(PROFILE)
    command = [sys.executable, *PROGRAM, str(tmp_path / "profile.yaml"), "--output_dir", str(tmp_path / "out")]
    of_accelerate = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # as accelerate launch sets them
    code, output = two_processes.run(command, 240, MODEL_PATH=policy, **of_accelerate)
    assert code == 2 and "launch: without a GPU accelerate would train with DDP" in output, output[-3000:]
