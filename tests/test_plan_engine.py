"""What the planner counts on CUDA that no training on a CPU shows, and what others measured on GPUs."""

from dataclasses import replace

import pytest

from experiments.checks.published_peaks import bounds_of, compared, setup_of
from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.errors import ConfigError
from rloo_memory.models import named_config
from rloo_memory.plan.setups import Setup, check
from rloo_memory.plan.trl_settings import from_settings
from rloo_memory.sizes import GIB

TRAIN = 3  # its place among the phases


@pytest.mark.torch
def test_adamw_that_is_not_fused_takes_a_copy_of_all_trained_weights_on_cuda(shared_fork):
    from rloo_memory.plan.scale_up.extrapolate import phase_peaks

    config = named_config("qwen3-8-layers")
    config.num_hidden_layers, config.layer_types, config.vocab_size = 2, config.layer_types[:2], 20_000
    small = Setup(64, max_completion_length=32, num_generations=4, per_device_train_batch_size=4, beta=0.0)
    fused, each = (
        {peak.phase: peak for peak in phase_peaks(replace(small, optim=optim), config)}
        for optim in ("adamw_torch_fused", "adamw_torch")
    )
    weights = fused["load"].kinds["parameters"]
    assert each["optimizer"].total - fused["optimizer"].total == pytest.approx(weights, rel=0.01)
    assert each["train"].total == fused["train"].total


@pytest.mark.torch
@pytest.mark.parametrize("bits", [16, 4])
def test_float16_is_planned_in_float16(shared_fork, bits):
    """Under bfloat16, sums of both are float32; that is what it takes only where both are asked for."""
    from rloo_memory.plan.scale_up.extrapolate import phase_peaks

    config = named_config("qwen3-8-layers")
    config.num_hidden_layers, config.layer_types, config.vocab_size = 2, config.layer_types[:2], 2000
    lora = {"use_peft": True, "lora_r": 8, "beta": 0.0, "max_completion_length": 32, "load_in_4bit": bits == 4}
    held = {
        name: phase_peaks(from_settings(512, lora | settings), config)[TRAIN].kinds["activations"]
        for name, settings in {
            "bfloat16": {"dtype": "bfloat16"},
            "fp16": {"dtype": "float16", "fp16": True},
            "no autocast": {"dtype": "float16", "bf16": False},
            "both": {"dtype": "float16", "bf16": True},
        }.items()
    }
    assert held["fp16"] == pytest.approx(held["bfloat16"], rel=0.005), held
    assert held["both"] > (1.25 if bits == 4 else 1.01) * held["fp16"], held


@pytest.mark.torch
def test_what_does_not_train_in_float16_is_said(planned):
    words = ("--model", "tiny-qwen3", "--prompt", 32, "--completion", 8, "--k", 2, "--dtype", "float16")
    assert "GradScaler refuses their gradients; dtype must be float32" in planned(*words).stderr
    said = planned(*words, "--lora", 4, "--bits", 4, "--arms", "stock")
    assert said.returncode == 0 and "fp16 on quantized weights: TRL makes adapters bfloat16" in said.stdout
    with pytest.raises(ConfigError, match="fp16 and bf16 are both on"):
        check(from_settings(32, {"fp16": True, "bf16": True}), named_config("tiny-qwen3"))


@pytest.mark.torch
def test_the_reference_is_planned_in_the_dtype_that_it_is_loaded_in(shared_fork):
    """TRL before 1.16 loads it in float32 beside an object, 1.16 as `model_init_kwargs` say, or as the policy."""
    import torch
    from transformers import AutoModelForCausalLM

    from rloo_memory.plan.ask import predict
    from trl import RLOOConfig

    config = named_config("tiny-qwen3")
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(parameter.numel() for parameter in policy.parameters())
    args = dict(max_completion_length=8, num_generations=2, per_device_train_batch_size=2, beta=0.1, report_to="none")
    for kwargs, where, bytes_each in (
        (None, {}, 2),
        (None, {"reference_dtype": "float32"}, 4),
        ({"dtype": "float32"}, {}, 4),
    ):
        settings = RLOOConfig(**args, use_cpu=True, model_init_kwargs=kwargs)
        found = predict(settings, policy, 16, device="cuda", **where).phases[0].kinds
        assert found["reference"] == pytest.approx(bytes_each * size, rel=0.01), (kwargs, where)
        assert found["parameters"] == pytest.approx(2 * size, rel=0.01)


def rows(name: str) -> list[dict[str, str]]:
    return read_csv(ROOT / "results" / "published" / name)


def test_published_peaks_are_within_the_bounds_of_the_predictions():
    facts, done = rows("gpu_peaks.csv"), rows("predicted.csv")
    assert [{name: row[name] for name in facts[0]} for row in done] == facts, "run experiments.checks.published_peaks"
    assert {row["holds"] for row in done} == {"yes", ""} and sum(row["holds"] == "yes" for row in done) >= 38
    for row in done:
        assert row["holds"] or row["not_held"], f"{row['source']}: not held, and nobody says why"
        if row["holds"]:
            bounds = bounds_of(row["metric"], setup_of(row))
            measured = float(row["measured_gib"]) - float(row["besides_gib"] or 0)
            assert bounds.hold(measured * GIB / int(row["predicted_bytes"])), row["source"]


@pytest.mark.slow
@pytest.mark.torch
def test_the_published_peaks_are_predicted_as_the_table_says():
    """One training of each kind: 4 bits with full logits, a hybrid, all weights, FSDP2, after a step."""
    chosen = [row for row in rows("predicted.csv") if row["holds"] == "yes" and row["metric"] != "reserved"]
    kinds = {(row["arm"], row["model"], row["where"]): row for row in chosen}
    known = {}
    for row in kinds.values():
        again = compared({name: row[name] for name in rows("gpu_peaks.csv")[0]}, known)
        assert int(again["predicted_bytes"]) == pytest.approx(int(row["predicted_bytes"]), rel=0.002), row["source"]
