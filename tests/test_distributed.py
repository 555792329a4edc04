"""Prefix sharing on two processes, each with its own prompts, trains as untouched TRL does there.

The processes have different numbers of tokens, of distinct prompts and of prompts that have something to share. With
sharded weights every pass is a collective, so one pass too few on one process is a deadlock."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import two_processes

ROOT = Path(__file__).resolve().parent.parent
PROBE = ROOT / "tests" / "probes" / "distributed.py"
RESHARD, KEEP = {"reshard_after_forward": True}, {"fsdp": {"reshard_after_forward": False}}
PARTS = {"fsdp": {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]}}  # shards within a layer
# Every third token ends a completion, so the processes generate for different numbers of steps
GREEDY = {"generation_kwargs": {"do_sample": False, "eos_token_id": list(range(1, 100, 3))}}

SHARED, WHOLE = {"prefix_sharing": True}, {"prefix_sharing": False}
TWO, ONE = {**SHARED, "completions_per_forward": 2}, {**SHARED, "completions_per_forward": 1}

# Untouched runs, and what each is compared with: gradient checkpointing, settings of the fork, other sharding
RUNS = {
    "ddp-rloo": (
        dict(trainer="rloo", evaluate=True),
        [(True, TWO, {}), (False, {**WHOLE, "tokens_per_forward": 16}, {})],
    ),
    "ddp-grpo": (dict(trainer="grpo", accumulate=2, dtype="float32"), [(True, ONE, {})]),
    "ddp-generate": (dict(trainer="grpo", generate=True, options=GREEDY), [(False, SHARED, {})]),
    "fsdp-rloo": (
        dict(trainer="rloo", accumulate=2, fsdp=RESHARD),
        [(False, SHARED, KEEP), (True, {**SHARED, "tokens_per_forward": 8}, {})],
    ),
    "fsdp-grpo": (
        dict(trainer="grpo", evaluate=True, dtype="float32", fsdp=RESHARD),
        [(True, ONE, PARTS), (True, TWO, {}), (True, {**WHOLE, "tokens_per_forward": 16}, {})],
    ),
    "fsdp-generate": (dict(trainer="rloo", generate=True, options=GREEDY, fsdp=RESHARD), [(True, SHARED, {})]),
    "fsdp-lora-generate": (
        dict(trainer="rloo", generate=True, options=GREEDY, fsdp=RESHARD, lora=True),
        [(True, SHARED, {})],
    ),
}


def launch(arm, runs, folder):
    """Runs the probe on two processes, with untouched TRL (arm "untouched") or the fork (arm "shared")."""
    trl = ROOT / ".build" / "fork" / ("shared" if arm == "shared" else "current-untouched")
    choice = ["--no-patches"] if arm == "untouched" else []
    build = [sys.executable, str(ROOT / "trl" / "fork.py"), "build", "current", str(trl), *choice]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(PROBE),
        str(folder),
        arm,
        json.dumps(runs),
    ]
    _, output = two_processes.run(command, PYTHONPATH=str(trl))  # about 30 s alone; other tests share the cores
    done = re.findall(r"done: (\S+)", output)  # anywhere in a line: two processes write into one pipe
    expected = [run["name"] for run in runs]
    # Not the exit status: gloo can abort when one process has left and the other one is about to
    assert done == expected, f"{arm}: of {expected} only {done} ended\n{output[-4000:]}"


@pytest.mark.slow
@pytest.mark.torch
def test_two_processes_train_with_prefix_sharing_as_without(tmp_path):
    """1e-5 is the bound of float64 weights: norms and log-probabilities are float32 there as well. With float32
    weights Adam turns the rounding noise of a gradient near zero into steps: 1e-4 from the second update on."""
    import torch

    def error(tensor, expected, scale):
        return ((tensor - expected).norm() / scale.norm()).item()

    untouched, shared, pairs = [], [], []
    for name, (arguments, variants) in RUNS.items():
        untouched.append({"name": name, **arguments})
        for number, (checkpointing, settings, sharding) in enumerate(variants):
            options = {**arguments.get("options", {}), **settings, "gradient_checkpointing": checkpointing}
            shared.append({**arguments, "name": f"{name}{number}", "options": options, **sharding})
            pairs.append((name, f"{name}{number}", arguments))
    launch("untouched", untouched, tmp_path)
    launch("shared", shared, tmp_path)

    for name, variant, arguments in pairs:
        expected = torch.load(tmp_path / f"{name}-untouched.pt")
        result = torch.load(tmp_path / f"{variant}-shared.pt")
        assert result["completions"] == expected["completions"], variant
        if "generate" in arguments:
            steps = [[max(map(len, rows)) for rows in calls] for calls in expected["completions"]]
            assert steps[0] != steps[1], "both processes generate for as long: the test would be empty"
            continue
        bound = 1e-4 if arguments.get("dtype") == "float32" else 1e-5
        assert len(result["logs"]) == len(expected["logs"]) > 3
        for logs, expected_logs in zip(result["logs"], expected["logs"], strict=True):
            # A mean of means depends on which completions share a micro-batch, and sharing shuffles them by prompt
            kept = ("loss",) if "accumulate" in arguments else expected_logs
            for key in kept:
                assert logs[key] == pytest.approx(expected_logs[key], rel=bound, abs=bound / 10), (variant, key)
        assert len(result["gradients"]) == len(expected["gradients"]) == 4
        for step, (gradients, expected_gradients) in enumerate(
            zip(result["gradients"], expected["gradients"], strict=True)
        ):
            assert gradients.keys() == expected_gradients.keys()
            for key, gradient in expected_gradients.items():
                assert error(gradients[key], gradient, gradient) < (bound if step else 1e-5), (variant, step, key)
        for key, after in expected["after"].items():
            assert error(result["after"][key], after, after) < bound / 10, (variant, key)
            assert error(expected["before"][key], after, after) > 1e-4, f"{key} was not trained"
