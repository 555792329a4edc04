"""Prefix sharing on two processes, each with its own prompts, trains as untouched TRL does there.

The processes have different numbers of tokens, of distinct prompts and of prompts that have something to share. With
sharded weights every pass is a collective, so one pass too few on one process is a deadlock."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import two_processes
from fork_tool import LINES, fork, obtain

ROOT = Path(__file__).resolve().parent.parent
PROBE = ROOT / "tests" / "probes" / "distributed.py"
pytestmark = pytest.mark.slow
NO_DEEPSPEED = "deepspeed is not here: make test-deepspeed"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason=NO_DEEPSPEED)
RESHARD, KEEP = {"reshard_after_forward": True}, {"fsdp": {"reshard_after_forward": False}}
PARTS = {"fsdp": {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]}}  # shards within a layer
# Every third token ends a completion, so the processes generate for different numbers of steps
GREEDY = {"generation_kwargs": {"do_sample": False, "eos_token_id": list(range(1, 100, 3))}}

SHARED, WHOLE = {"prefix_sharing": True}, {"prefix_sharing": False}
TWO, ONE = {**SHARED, "tokens_per_forward": 2 * 7}, {**SHARED, "tokens_per_forward": 1}  # completions a pass

# Prompts that begin with 130 tokens alike, and go on with 3 to 7
COMMON = [f"w{i % 90}" for i in range(130)]


def alike(number):
    return " ".join(COMMON + [f"w{(7 * number + i) % 90}" for i in range(3 + number % 5)])


ALIKE = [[[alike(i), alike(i + 1)] for i in (4 * step, 4 * step + 2)] for step in range(4)]
EQUAL_FIRST = [[["w11 w12 w13"] * 2, ["w3", "w91 w92 w93 w94 w95 w4"]]] + ALIKE[:2]
SORTED = [[["w5 w7 w8", "w6 w9 w2"], [f"w21 w22 w3{step}", "w4"]] for step in range(4)]  # on one process, by length
# 7 and 3 tokens, and 6 new ones: the first generation crosses the length of the first training on one process
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 1.0}
LONGROPE = {"model": {"rope_parameters": {**ROPE, "original_max_position_embeddings": 10}}}
SHORT = [[["w5", "w7 w8"], ["w21", f"w3{step}"]] for step in range(4)]  # rows go through the model whole


def of(trainer, *variants, **arguments):
    """A run without sharing, and what is compared with it: gradient checkpointing, settings, and what else differs."""
    return {"trainer": trainer, **arguments}, variants or [(True, SHARED, {})]


OF_16 = {**WHOLE, "tokens_per_forward": 16}
FSDP, GENERATE = {"fsdp": RESHARD}, {"generate": True, "options": GREEDY}
RUNS = {
    "ddp-rloo": of("rloo", (True, TWO, {}), (False, OF_16, {}), evaluate=True),
    "ddp-grpo": of("grpo", (True, ONE, {}), accumulate=2, dtype="float32"),
    # One row a micro-batch: a prompt goes through the model with the first of three, on each process
    "ddp-split": of("rloo", rows=1),
    "ddp-alike": of("grpo", (True, SHARED, {}), (False, TWO, {}), rows=1, accumulate=2, prompts=ALIKE),
    "fsdp-rloo": of(
        "rloo", (False, SHARED, KEEP), (True, {**SHARED, "tokens_per_forward": 8}, {}), accumulate=2, **FSDP
    ),
    "fsdp-grpo": of("grpo", (True, ONE, PARTS), (True, OF_16, {}), evaluate=True, dtype="float32", **FSDP),
    "fsdp-short": of("rloo", rows=1, prompts=SHORT, **FSDP),
    "fsdp-alike": of("rloo", rows=1, prompts=ALIKE, **FSDP),
    "fsdp-alike-generate": of("grpo", prompts=ALIKE, **GENERATE, **FSDP),
    "fsdp-lora-split": of("grpo", (True, SHARED, PARTS), rows=1, lora=True, **FSDP),
    # The first update's prompts are equal on one process
    "fsdp-equal": of("grpo", dtype="float32", prompts=EQUAL_FIRST, options={"seed": 3}, **FSDP),
    "fsdp-sorted": of("grpo", prompts=SORTED, sort="rows", **FSDP),
    "fsdp-sorts": of("rloo", prompts=SORTED, sort="scores", **FSDP),
    "fsdp-longrope-generate": of("grpo", generate=True, options={**GREEDY, **LONGROPE}, **FSDP),
    # Prompts that differ within a group, on one process
    "fsdp-differ-split": of("rloo", rows=1, differ=True, **FSDP),
    "fsdp-differ-generate": of("grpo", differ=True, **GENERATE, **FSDP),
    "fsdp-lora-generate": of("rloo", lora=True, **GENERATE, **FSDP),
}

# The option of trl/first, which has trainers of its own
NATIVE_RUNS = {
    "native-ddp": of("rloo", native=True, evaluate=True),
    "native-fsdp": of("rloo", native=True, **FSDP),
    "native-fsdp-lora": of("grpo", native=True, accumulate=2, lora=True, **FSDP),
}

# DeepSpeed computes in float32 at most
ZERO3, HOST = {"zero3": {}, "dtype": "float32"}, {"device": "cpu"}
# The processes generate together, as long as the last of them needs
SHARDED = {"generate": True, "options": {**GREEDY, "ds3_gather_for_generation": False}}
LORA = {"lora": True, "options": {"gradient_checkpointing": True}}
ZERO3_RUNS = {
    "zero3-rloo": of("rloo", (False, SHARED, {}), (True, TWO, {}), (True, OF_16, {}), evaluate=True, **ZERO3),
    "zero3-grpo": of("grpo", (False, ONE, {}), (True, {**SHARED, "tokens_per_forward": 8}, {}), accumulate=2, **ZERO3),
    # From the checkpoint of the run before
    "zero3-resume": of("grpo", (True, TWO, {"save": 2}), (True, SHARED, {"resume": 2}), **ZERO3),
    "zero3-offload": of(
        "rloo",
        (True, TWO, {"save": 2}),
        (True, TWO, {"resume": 2}),
        dtype="float32",
        zero3={"offload_param": HOST, "offload_optimizer": HOST},
    ),
    "zero3-lora": of("rloo", (True, TWO, {}), (False, SHARED, {}), (True, OF_16, {}), **LORA, **ZERO3),
    "zero3-reward": of("rloo", (True, {**SHARED, "tokens_per_forward": 24}, {}), reward_model=True, **ZERO3),
    "zero3-split": of("rloo", (False, SHARED, {}), (True, SHARED, {}), rows=1, **ZERO3),
    "zero3-alike": of("rloo", rows=1, prompts=ALIKE, **ZERO3),
    "zero3-lora-split": of(
        "grpo",
        (True, {**SHARED, "gradient_checkpointing_kwargs": {"preserve_rng_state": True}}, {}),
        rows=1,
        **LORA,
        **ZERO3,
    ),
    "zero3-generate": of("grpo", **GENERATE, **ZERO3),
    "zero3-generate-sharded": of("grpo", **SHARDED, **ZERO3),
    "zero3-lora-generate-sharded": of("grpo", lora=True, **SHARDED, **ZERO3),
}
NATIVE_ZERO3_RUNS = {
    "native-zero3": of("grpo", native=True, **ZERO3),
    "native-zero3-lora": of("rloo", native=True, lora=True, **ZERO3),
}


def launch(runs, folder, **environment):
    """Runs the probe on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    missing = runs
    for _ in range(2):
        command = [*launcher, str(PROBE), str(folder), json.dumps(missing)]
        # About 5 s a run alone; other tests share the cores
        _, output = two_processes.run(command, 120 + 40 * len(missing), DS_ACCELERATOR="cpu", **environment)
        # Not the exit status: a file that is there is whole, however the processes ended
        missing = [run for run in missing if not (folder / f"{run['name']}.pt").exists()]
        # Seen once in some fifty launches, with untouched TRL: a process aborts amid a run. What is missing runs again
        if not missing or "(SIGABRT)" not in output:
            break
    missing = [run["name"] for run in missing]
    assert not missing, f"{missing} did not end\n{output[:4000]}\n...\n{output[-4000:]}"


def check(runs, folder, **environment):
    """Trains untouched and shared: the same completions and logs, and weights that moved to the same place. 1e-5 is
    the bound of float64 weights: norms and log-probabilities are float32 there as well (seen: 1e-6). With float32
    weights the rounding of one update is in all that follow: 1e-4 (seen: 1.5e-5)."""
    import torch

    untouched, shared, pairs = [], [], []
    for name, (arguments, variants) in runs.items():
        untouched.append({"name": name, **arguments})
        for number, (checkpointing, settings, other) in enumerate(variants):
            options = {**arguments.get("options", {}), **settings, "gradient_checkpointing": checkpointing}
            shared.append({**arguments, "name": f"{name}{number}", "options": options, **other})
            pairs.append((name, shared[-1]))
    launch(untouched + shared, folder, **environment)

    for name, arguments in pairs:
        variant = arguments["name"]
        expected, result = (torch.load(folder / f"{run}.pt") for run in (name, variant))
        if "resume" not in arguments:
            assert result["completions"] == expected["completions"], variant
        if "generate" in arguments:
            steps = [[max(map(len, rows)) for rows in calls] for calls in expected["completions"]]
            assert steps[0] != steps[1], "both processes generate for as long: the test would be empty"
            continue
        bound = 1e-4 if arguments.get("dtype") == "float32" else 1e-5
        assert len(expected["logs"]) == 3 + arguments.get("evaluate", False)
        for logs, expected_logs in zip(result["logs"], expected["logs"], strict=True):
            # A mean of means depends on which completions share a micro-batch, and sharing shuffles them by prompt
            kept = ("loss",) if {"accumulate", "rows"} & arguments.keys() else expected_logs
            for key in kept:
                assert logs[key] == pytest.approx(expected_logs[key], rel=bound, abs=bound / 10), (variant, key)
        assert result["after"].keys() == expected["after"].keys()
        for key, after in expected["after"].items():
            moved = (after - expected["before"][key]).norm()
            assert moved > 1e-4 * after.norm(), f"{key} was not trained"
            assert (result["after"][key] - after).norm() < bound * moved, (variant, key)


def check_native(runs, folder):
    obtain(LINES["first"])
    fork.build(LINES["first"], folder / "fork", None)
    check(runs, folder, PYTHONPATH=str(folder / "fork"))


def test_two_processes_train_with_prefix_sharing_as_without(tmp_path):
    import torch

    check(RUNS, tmp_path)
    # Alone, the prompts of a batch save no more than 3 times as many: what they begin with is shared
    assert min(torch.load(tmp_path / "fsdp-alike0.pt")["token_ratios"]) > 4


def test_two_processes_train_with_the_first_series_as_without(tmp_path):
    check_native(NATIVE_RUNS, tmp_path)


@needs_deepspeed
def test_two_processes_train_with_zero3_and_prefix_sharing_as_without(tmp_path):
    check(ZERO3_RUNS, tmp_path)


@needs_deepspeed
def test_two_processes_train_with_zero3_and_the_first_series_as_without(tmp_path):
    check_native(NATIVE_ZERO3_RUNS, tmp_path)


@needs_deepspeed
def test_zero3_never_gathers_more_than_some_layers(probe):
    """Of eight layers of equal size; with gradient checkpointing. Frozen weights that a recomputed pass gathered would
    all stay until its backward is done."""
    for name, part in probe("zero3_gathered").items():
        assert part < 0.35, name


@needs_deepspeed
def test_models_that_zero3_divides_are_tried_as_others(probe):
    found = probe("zero3_trial")
    assert "differ from those of whole sequences" in found.pop("sees rows")
    assert found == {"Qwen3": True, "Qwen3, bfloat16": True, "Bamba": True, "GPT-2": False}
