"""What the planner counts on CUDA that no training on a CPU shows, and what others measured on GPUs. Then what vLLM
takes, which is not here: tests/with_vllm trains with it."""

from dataclasses import replace

import pytest

from experiments.checks.published_peaks import bounds_of, compared, setup_of
from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.errors import ConfigError
from rloo_memory.models import named_config
from rloo_memory.plan import doctor
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.peaks import VLLM
from rloo_memory.plan.predict import predict
from rloo_memory.plan.remarks import remarks
from rloo_memory.plan.scale_up.extrapolate import phase_peaks
from rloo_memory.plan.setups import Setup, check
from rloo_memory.plan.trl_settings import from_settings
from rloo_memory.sizes import GIB

SHORT = Setup(64, max_completion_length=32, num_generations=4, per_device_train_batch_size=4, beta=0.0)


def small():
    config = named_config("qwen3-8-layers")
    config.num_hidden_layers, config.layer_types, config.vocab_size = 2, config.layer_types[:2], 20_000
    return config


def peaks_of(setup):
    return {peak.phase: peak for peak in phase_peaks(setup, small())}


def test_adamw_that_is_not_fused_takes_a_copy_of_all_trained_weights_on_cuda():
    fused, each = (peaks_of(replace(SHORT, optim=optim)) for optim in ("adamw_torch_fused", "adamw_torch"))
    weights = fused["load"].kinds["parameters"]
    assert each["optimizer"].total - fused["optimizer"].total == pytest.approx(weights, rel=0.01)
    assert each["train"].total == fused["train"].total


def test_adafactor_makes_the_update_of_a_matrix_beside_it():
    """In float32, with what is taken from the weights; of 16-bit ones it makes both and the gradient, too."""
    largest = 4 * 20_000 * small().hidden_size
    for dtype, copies in (("float32", 2), ("bfloat16", 4)):
        peak = peaks_of(replace(SHORT, optim="adafactor", dtype=dtype))["optimizer"]
        assert peak.kinds["activations"] == pytest.approx(copies * largest, rel=0.01), dtype


@pytest.mark.parametrize("bits", [16, 4])
def test_float16_is_planned_in_float16(bits):
    """Under bfloat16, sums of both are float32; that is what it takes only where both are asked for."""
    lora = {"use_peft": True, "lora_r": 8, "beta": 0.0, "max_completion_length": 32, "load_in_4bit": bits == 4}
    asked = {"half": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16", "fp16": True}, "both": {"dtype": "float16"}}
    setups = {name: from_settings(512, lora | settings) for name, settings in asked.items()}
    held = {name: peaks_of(setup)["train"].kinds["activations"] for name, setup in setups.items()}
    assert held["fp16"] == pytest.approx(held["half"], rel=0.005), held
    assert held["both"] > (1.25 if bits == 4 else 1.01) * held["fp16"], held
    assert remarks(setups["both"], small()) and not remarks(setups["half"], small())
    saved_in_half = small()
    saved_in_half.dtype = "float16"
    (said,) = remarks(setups["half"], saved_in_half)
    assert "float16 weights in the checkpoint" in said and "if you train with fp16: true, plan that" in said
    with pytest.raises(ConfigError, match="fp16 and bf16 are both on"):
        check(replace(setups["fp16"], bf16=True), small())


@pytest.mark.parametrize(
    "option, words",
    [
        ("use_transformers_continuous_batching", "max_memory_percent"),
        ("use_transformers_paged", "max_memory_percent"),
        ("use_liger_kernel", "predicted with PyTorch's layers"),
    ],
)
def test_it_is_said_what_is_not_planned(option, words):
    (said,) = remarks(from_settings(64, {option: True}), small())
    assert words in said


def test_more_tokens_than_the_config_has_positions_are_planned_and_said():
    setup = Setup(30_000, max_completion_length=5000)
    check(setup, small())
    assert "35000 tokens are more than the 32768 positions" in remarks(setup, small())[0]


def rows(name: str) -> list[dict[str, str]]:
    return read_csv(ROOT / "results" / "published" / name)


def test_published_peaks_are_within_the_bounds_of_the_predictions():
    facts, done = rows("gpu_peaks.csv"), rows("predicted.csv")
    assert [{name: row[name] for name in facts[0]} for row in done] == facts, "run experiments.checks.published_peaks"
    assert {row["holds"] for row in done} == {"yes", ""} and sum(row["holds"] == "yes" for row in done) >= 38
    for row in done:
        assert row["holds"] or row["not_held"], f"{row['source']}: not held, and nobody says why"
        if row["holds"]:
            low, high = bounds_of(row["metric"], setup_of(row))
            measured = float(row["measured_gib"]) - float(row["besides_gib"] or 0)
            assert low <= measured * GIB / int(row["predicted_bytes"]) <= high, row["source"]


@pytest.mark.slow
def test_the_published_peaks_are_predicted_as_the_table_says():
    """One training of each kind: 4 bits with full logits, a hybrid, all weights, FSDP2, after a step."""
    chosen = [row for row in rows("predicted.csv") if row["holds"] == "yes" and row["metric"] != "reserved"]
    kinds = {(row["arm"], row["model"], row["where"]): row for row in chosen}
    known = {}
    refused = next(row for row in rows("predicted.csv") if not row["ratio"])  # nothing is held to it
    assert "load_in_4bit" in refused["settings"] and "fully_sharded" in refused["where"]
    for row in (refused, *kinds.values()):
        again = compared({name: row[name] for name in rows("gpu_peaks.csv")[0]}, known)
        size, before = (int(each["predicted_bytes"] or 0) for each in (again, row))
        assert size == pytest.approx(before, rel=0.002), row["source"]


# -- vLLM's memory, as planner, doctor and launcher count it ----------------------------------------------------------

LENGTHS = dict(prompt_tokens=64, max_completion_length=4096, num_generations=8, per_device_train_batch_size=1,
               steps_per_generation=8, gradient_accumulation_steps=8)  # fmt: skip


def peaks(**more):
    """Of a model whose cache is larger than its logits."""
    config = named_config("qwen3-0.6b")
    config.vocab_size, config.num_hidden_layers, config.layer_types = 1000, 4, config.layer_types[:4]
    return {peak.phase: peak for peak in predict("this", Setup(**LENGTHS, **more), config).phases}


@pytest.fixture(scope="module")
def own():
    """Where transformers generates: eight completions of 4,096 tokens, one of them trained on at a time."""
    return peaks()


def test_a_cache_that_vllm_has_is_not_the_trainers(own):
    server = peaks(use_vllm=True, vllm_mode="server", device_memory=24 * GIB)
    assert max(own, key=lambda name: own[name].total) == "generate"
    assert set(server["generate"].kinds) == {"parameters", "reference", "optimizer state"}
    others = own.keys() - {"generate"}
    assert {name: server[name] for name in others} == {name: own[name] for name in others}


@pytest.mark.parametrize("sleeps, phases", [
    (False, {"load", "generate", "score", "train", "optimizer"}), (True, {"load", "generate"}),
])  # fmt: skip
def test_a_colocated_engine_has_its_share_of_the_device(own, sleeps, phases):
    share = dict(vllm_gpu_memory_utilization=0.25, vllm_enable_sleep_mode=sleeps, device_memory=24 * GIB)
    server = peaks(use_vllm=True, vllm_mode="server")
    found = peaks(use_vllm=True, **share)
    more = {name: found[name].total - server[name].total for name in found}
    assert more == {name: 6 * GIB if name in phases else 0 for name in found}
    assert found["generate"].kinds[VLLM] == 6 * GIB
    # it neither comes nor goes: the allocator wastes nothing of it
    assert Room(0, 0.5).needed([found["generate"]]) == Room(0, 0.5).needed([server["generate"]]) + 6 * GIB


def test_a_share_below_the_weights_is_refused_with_the_least_one():
    config = named_config("qwen3-8b")
    setup = Setup(64, lora_rank=16, use_vllm=True, vllm_gpu_memory_utilization=0.05, device_memory=79 * GIB)
    with pytest.raises(ConfigError, match=r"0.05 is 3.95 GiB here, .* alone are 15.26; set at least 0.20"):
        check(setup, config)
    two = dict(vllm_gpu_memory_utilization=0.1, vllm_tensor_parallel_size=2)
    for fits in (dict(vllm_gpu_memory_utilization=0.2), two, dict(vllm_mode="server"), dict(device_memory=0)):
        check(replace(setup, **fits), config)
    with pytest.raises(ConfigError, match="let a server generate"):
        check(replace(setup, device_memory=12 * GIB), config)


def test_the_planner_and_the_doctor_say_so(planned, capsys, tmp_path):
    said = "vLLM's share, 0.5 of the device, 4.00 GiB, is in it throughout"
    (tmp_path / "profile.yaml").write_text("use_vllm: true\nbeta: 0.0\nvllm_gpu_memory_utilization: 0.5\n")
    words = f"--model tiny-qwen3 --profile {tmp_path}/profile.yaml --prompt 64 --completion 16 --device-memory 8GiB"
    result = planned(*words.split(), "--arms", "stock")
    assert said in result.stdout and "vLLM 4.00" in result.stdout, result.stderr
    assert doctor.main([*words.split(), "--output", str(tmp_path / "fits.yaml")]) == 0
    assert said in capsys.readouterr().out
