"""The planner: predictions beside measurements, what fits, and what is refused."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from experiments.checks.measured_ranges import errors_of
from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.device import status_bytes
from rloo_memory.errors import ConfigError
from rloo_memory.models import named_config, shape_config
from rloo_memory.phases import HighWater
from rloo_memory.plan import ask, predict
from rloo_memory.plan.__main__ import fits
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.setups import Setup, check
from rloo_memory.plan.trl_settings import from_settings
from rloo_memory.settings.trl_parser import out_of_range
from rloo_memory.sizes import GIB
from trl import GRPOConfig


@pytest.mark.slow
def test_every_phase_is_predicted_within_ten_percent_of_a_real_training(tmp_path):
    """Some of the cases; all are in results/*/plan_check.csv."""
    command = [sys.executable, "-m", "experiments.checks.planner_check", "--cases", "stock-k8,shared-k8-qwen2vl"]
    where = ("--device", "cpu", "--results", tmp_path, "--machine", "here")
    subprocess.run([*command, *where], cwd=ROOT, check=True, timeout=300)
    rows = read_csv(tmp_path / "here" / "plan_check.csv")
    assert len(rows) == 2 * 4
    wrong = [row for row in rows if abs(float(row["error"])) > 0.1]
    assert not wrong, "\n".join(f"{row['case']} {row['phase']}: {row['error']}" for row in wrong)
    assert len({row["measured_bytes"] for row in rows}) == 8, "the cases and phases do not differ: an empty test"


def test_a_class_of_settings_that_is_derived_from_trls_is_asked_for_as_trls():
    """What it adds is no setting of a trainer."""

    @dataclass
    class Own(GRPOConfig):
        more: int = 1

    of_generation = {"top_p": 0.5, "top_k": None}
    kwargs = {"model_init_kwargs": {"attn_implementation": "eager"}, "generation_kwargs": of_generation}
    config = Own(use_cpu=True, num_generations=4, delta=2.0, top_p=0.9, top_k=7, **kwargs)
    asked = ask.settings_of(config)
    for setup in from_settings(10, asked), from_settings(10, {**kwargs, "top_p": 0.9, "top_k": 7}):
        assert (setup.attn_implementation, setup.top_p, setup.top_k) == ("eager", 0.5, 7)
    assert asked["algorithm"] == "grpo" and asked["delta"] == 2.0 and "more" not in asked


def test_what_is_said_of_errors_and_of_time_is_what_the_committed_results_say():
    assert measured_errors() == errors_of(ROOT / "results"), "run python -m experiments.checks.measured_ranges"
    assert measured_errors().low < 1 < measured_errors().high < 1.1 and measured_errors().peaks > 100


@pytest.mark.parametrize("wasted, sizes", [(0.0, (9500, 10_100, 12_000)), (0.33, (9900, 11_200, 13_000))])
def test_a_peak_that_fits_by_less_than_the_error_or_the_allocators_waste_is_said_to_just_fit(wasted, sizes):
    """It wastes of what comes and goes, not of what stays."""
    kinds = {"parameters": 4000, "gradients": 2000, "activations": 4000}
    prediction = Prediction("stock", Setup(10), [PredictedPeak("train", 10_000, kinds, 0)])
    assert [fits(prediction, Room(size, wasted)).split()[0] for size in sizes] == ["short", "just", "yes"]


@pytest.mark.slow
def test_the_longest_prompt_that_fits_is_longer_with_shared_prompts(planned):
    words = "--model tiny-qwen3 --prompt 1000 --completion 64 --k 4 --dtype float32 --arms stock,shared"
    result = planned(*words.split(), "--device-memory", "256MiB", "--reserve", "128MiB", "--largest", "prompt")
    assert result.returncode == 0, result.stderr[-3000:]
    found = [line for line in result.stdout.splitlines() if ": largest prompt" in line]
    largest = {line.split(":")[0]: int(line.split()[-1]) for line in found}
    assert 1000 <= largest["stock"] < largest["shared"]


def test_the_largest_k_is_found_in_few_steps_where_odd_ones_take_less(monkeypatch):
    tried = []

    def needed(setup):
        tried.append(setup.num_generations)
        return 600 + setup.num_generations * (22 - 3 * (setup.num_generations % 2))

    monkeypatch.setattr(predict, "predict", lambda arm, setup, *_: SimpleNamespace(phases=setup))
    setup, room = Setup(prompt_tokens=300, max_completion_length=64), SimpleNamespace(size=30_000, needed=needed)
    config = shape_config("tiny-qwen3")
    largest = predict.largest_that_fits("stock", setup, config, "k", room, say=lambda line: None)
    assert needed(setup.with_k(largest)) <= room.size and largest > 1300
    assert len(tried) < 25, tried


BAD_INPUT = [
    (["--model", "Qwen/Qwen3-9B"], ["Qwen3-9B", "did you mean", "hub:"]),
    (["--model", "./nofolder"], ["no folder ./nofolder", "config.json"]),
    (["--model", "BROKEN"], ["BROKEN"]),
    (["--model", "qwen3-8b", "--profile", "own.yaml"], ["own.yaml: beta is nan: it must be a finite number"]),
    (["--model", "qwen3-8b", "--k", "1000000"], ["--k is 1000000", "at most 4096"]),
    (["--model", "qwen3-8b", "--k", "4096", "--completion", "40000"], ["--k 4096", "134,217,728 tokens"]),
    (["--model", "LEARNED", "--completion", "2000"], ["--prompt 100", "--completion 2000", "2100", "1024"]),
    (["--model", "qwen3-8b", "--bits", "4"], ["4-bit", "--lora"]),
    (["--model", "qwen3-8b", "--dtype", "float16"], ["GradScaler refuses their gradients; dtype must be float32"]),
    (["--model", "qwen3-8b", "--device-memory", "24GiB", "--reserve", "30GiB"], ["--reserve 30GiB", "100MiB"]),
    (["--model", "qwen3-8b", "--largest", "k"], ["--device-memory"]),
    (["--model", "qwen3-8b", "--arms", "stock-tokens"], ["stock-tokens", "--tokens-per-forward"]),
    (["--model", "qwen3-8b", "--json", "/no/such/folder/plan.json"], ["/no/such/folder/plan.json", "cannot write"]),
    (["--model", "qwen3-8b", "--k", "0", "--beta", "nan"], ["--k is 0", "--beta is nan"]),
    (["--model", "qwen3-8b", "--device-memory", "24"], ["did you mean 24GiB?"]),
    (["--model", "qwen2.5-vl-8-layers", "--image", "280"], ["--image '280'", "like 1280x720"]),
    (["--model", "qwen2.5-vl-8-layers", "--image", "4x280"], ["4x280", "8 to 16,384"]),
    (["--model", "gemma-3-8-layers", *["--image", "99x99"] * 2], ["--prompt 100", "its 2 images", "at least 132"]),
    (["--model", "qwen3-8-layers", "--image", "280x224"], ["qwen3", "takes no images", "multimodal"]),
    (["--model", "GEMMA4", "--image", "280x224"], ["knows images of qwen2_vl", "not of gemma4"]),
]


@pytest.mark.parametrize("arguments, parts", BAD_INPUT, ids=[" ".join(arguments)[:50] for arguments, _ in BAD_INPUT])
def test_bad_input_is_one_line_with_value_and_remedy(arguments, parts, planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("BROKEN").mkdir()
    Path("BROKEN", "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": -1}')
    Path("LEARNED").mkdir()
    Path("LEARNED", "config.json").write_text('{"model_type": "gpt2"}')
    Path("GEMMA4").mkdir()
    Path("GEMMA4", "config.json").write_text('{"model_type": "gemma4", "vision_config": null}')
    Path("own.yaml").write_text("beta: .nan")
    result = planned("--prompt", "100", *arguments)
    assert result.returncode == 2 and result.stderr.startswith("plan: ") and result.stderr.count("\n") == 1, result
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.mark.parametrize("name, value", [
    ("temperature", 0.0), ("vllm_gpu_memory_utilization", 0.0), ("num_generations", 5000), ("lora_dropout", 1.0),
])  # fmt: skip
def test_a_number_has_one_range_for_planner_and_launcher(name, value):
    with pytest.raises(ConfigError) as caught:
        check(Setup(100, **{name: value}), named_config("tiny-qwen3"))
    assert str(caught.value) == out_of_range(name, value)


def test_adapters_are_planned_as_the_settings_have_them(planned, tmp_path):
    """Fewer target modules take less, dropout's masks more, and no prompt is shared with dropout."""
    profile, path = tmp_path / "own.yaml", tmp_path / "plan.json"
    words = ("--model", "tiny-qwen3", "--profile", profile, "--prompt", 300, "--arms", "stock,shared", "--json", path)
    sizes = {}
    for modules, dropout, arms in (("q_proj", 0.0, 2), ("all-linear", 0.0, 2), ("q_proj", 0.1, 1)):
        own = {"use_peft": True, "lora_target_modules": [modules], "lora_dropout": dropout, "num_generations": 4}
        profile.write_text(yaml.safe_dump(own | {"gradient_checkpointing": False}))
        assert planned(*words).returncode == 0
        plans = json.loads(path.read_text())["predictions"]
        sizes[modules, dropout] = {phase["phase"]: phase["total"] for phase in plans[0]["phases"]}
        assert len(plans) == arms
    assert sizes["q_proj", 0.0]["optimizer"] < sizes["all-linear", 0.0]["optimizer"]
    assert sizes["q_proj", 0.0]["train"] < sizes["q_proj", 0.1]["train"]
    profile.write_text(yaml.safe_dump(own | {"lora_target_modules": ["no_such_layer"]}))
    assert "['no_such_layer']" in planned(*words).stderr


@pytest.mark.parametrize("k, rows, steps, accumulation, new", [
    (8, 8, 1, 1, 12), (8, 2, 4, 4, 6), (6, 12, 2, 1, 4), (4, 1, 8, 2, 10), (2, 24, 1, 3, 40), (12, 5, 12, 7, 9),
    (6, 4, 3, 3, 3), (12, 6, 4, 4, 6),
])  # fmt: skip
def test_any_k_makes_batches_that_a_trainer_accepts_with_as_many_prompts(k, rows, steps, accumulation, new):
    batches = dict(per_device_train_batch_size=rows, steps_per_generation=steps)
    setup = Setup(100, num_generations=k, gradient_accumulation_steps=accumulation, **batches)
    changed = setup.with_k(new)
    for accepted in (changed, changed.arm("shared"), changed.with_shared_groups(), changed.arm("stock-accumulate")):
        check(accepted, named_config("tiny-qwen3"))
    assert changed.generation_rows // new == setup.generation_rows // k, "as many prompts"
    assert rows % k == 0 or changed.per_device_train_batch_size <= rows
    parts = replace(setup, prefix_sharing=True).with_k(new)
    assert rows % k == 0 or new % parts.per_device_train_batch_size == 0, "a micro-batch that can be shared"


def test_the_simulation_calls_the_models_as_a_real_training_does(probe):
    calls = probe("model_calls")
    assert len(calls) == 9
    for case, (trained, simulated) in calls.items():
        assert trained == simulated, case
    models = {case: {call[0] for call in trained} for case, (trained, _) in calls.items()}
    assert models["shared-one"] == {"policy", "reference", "reward model", "head"}
    assert models["shared-lora"] == {"policy", "head"}
    assert calls["shared-one"][0] != calls["stock"][0], "an empty test"


def test_planning_takes_no_memory_for_the_masks_of_long_prompts():
    """Of 60,000 tokens, a mask with a number for each query and key takes 7 GB."""
    config = extrapolate.with_layers(named_config("openai/gpt-oss-20b"), 2)
    setup = Setup(60_000, 5000, num_generations=4, per_device_train_batch_size=4, lora_rank=8).arm("shared")
    if not (high_water := HighWater("cpu")).can_reset:
        pytest.skip("this kernel does not let a process reset its high-water mark")
    before = status_bytes("VmRSS")
    peaks = extrapolate.phase_peaks(setup, config)
    assert high_water.read()[2] - before < GIB
    assert max(peak.total for peak in peaks) > 2 * setup.prompt_tokens**2, "masks are counted"


THREADS = """
import torch
from rloo_memory.plan.__main__ import main
torch.set_num_threads(2)
(torch.ones(3000, 3000) * 2).sum()
main("--model tiny-qwen3 --prompt 3000 --completion 64 --k 8 --arms shared".split())
"""


@pytest.mark.slow
def test_a_process_that_has_computed_on_threads_predicts():
    """The processes that it forks have none of them, and waited for them for ever."""
    subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, check=True, timeout=100, stdout=subprocess.DEVNULL)
