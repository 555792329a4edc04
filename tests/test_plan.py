"""The planner: predictions beside measurements, what fits, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.plan.accuracy.cards import size_as_sold
from rloo_memory.plan.setups import Setup, check


def run(module, *arguments):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.torch
def test_every_phase_is_predicted_within_ten_percent_of_a_real_training(tmp_path):
    """Some of the cases; all are in results/*/plan_check.csv."""
    cases = "stock-k8,shared-k8-qwen2vl"
    where = ("--device", "cpu", "--results", tmp_path, "--machine", "here")
    result = run("experiments.checks.planner_check", *where, "--cases", cases)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = read_csv(tmp_path / "here" / "plan_check.csv")
    assert len(rows) == 2 * 4
    wrong = [row for row in rows if abs(float(row["error"])) > 0.1]
    assert not wrong, "\n".join(f"{row['case']} {row['phase']}: {row['error']}" for row in wrong)
    assert len({row["measured_bytes"] for row in rows}) == 8, "the cases and phases do not differ: an empty test"


@pytest.mark.slow
@pytest.mark.torch
def test_a_large_model_is_planned_without_weights(tmp_path):
    path = tmp_path / "plan.json"
    words = (
        f"--model Qwen/Qwen3-1.7B --prompt 2000 --completion 256 --k 4 --dtype bfloat16 "
        f"--tokens-per-forward 514 --device-memory 11.7GiB --arms stock,shared --json {path}"
    )
    result = run("rloo_memory.plan", *words.split())
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["  1 of 2", "  2 of 2"], "only progress: no library's noise"
    assert f"python -m visualization.charts.plan {path}" in result.stdout
    result_file = json.loads(path.read_text())
    peaks = {p["arm"]: max(phase["total"] for phase in p["phases"]) for p in result_file["predictions"]}
    weights = result_file["predictions"][0]["phases"][0]["kinds"]["parameters"]
    assert 1.7e9 * 2 < weights < 1.75e9 * 2  # its published number of parameters, in bfloat16
    assert weights < peaks["shared"] < peaks["stock"]
    short = (peaks["stock"] - result_file["device_memory_bytes"]) / 2**30
    assert f"short by {short:.2f} GiB" in result.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_the_longest_prompt_that_fits_is_longer_with_shared_prompts(planned):
    words = (
        "--model tiny-qwen3 --prompt 1000 --completion 64 --k 4 --dtype float32 --device-memory 256MiB "
        "--reserve 128MiB --largest prompt --arms stock,shared"
    )
    result = planned(*words.split())
    assert result.returncode == 0, result.stderr[-3000:]
    found = [line for line in result.stdout.splitlines() if ": largest prompt" in line]
    largest = {line.split(":")[0]: int(line.split()[-1]) for line in found}
    assert 1000 <= largest["stock"] < largest["shared"]


BAD_INPUT = [
    (["--model", "Qwen/Qwen3-9B"], ["Qwen3-9B", "did you mean", "hub:"]),
    (["--model", "./nofolder"], ["no folder ./nofolder", "config.json"]),
    (["--model", "BROKEN"], ["BROKEN"]),
    (["--model", "qwen3-8b", "--profile", "own.yaml"], ["beta is nan", "prefix_sharing is 'yes'"]),
    (["--model", "qwen3-8b", "--k", "1000000"], ["--k 1000000", "134,217,728 tokens"]),
    (["--model", "qwen3-8b", "--completion", "60000"], ["--prompt 100", "--completion 60000", "60100", "40960"]),
    (["--model", "qwen3-8b", "--bits", "4"], ["4-bit", "--lora"]),
    (["--model", "qwen3-8b", "--optim", "adam8"], ["adam8", "adamw_8bit"]),
    (["--model", "qwen3-8b", "--device-memory", "24GiB", "--reserve", "30GiB"], ["--reserve 30GiB", "100MiB"]),
    (["--model", "qwen3-8b", "--largest", "k"], ["--device-memory"]),
    (["--model", "qwen3-8b", "--arms", "stock-tokens"], ["stock-tokens", "--tokens-per-forward"]),
    (["--model", "qwen3-8b", "--json", "/no/such/folder/plan.json"], ["/no/such/folder/plan.json", "cannot write"]),
    (["--model", "qwen3-8b", "--k", "0", "--beta", "nan"], ["--k is 0", "--beta is nan"]),
    (["--model", "qwen3-8b", "--device-memory", "24"], ["did you mean 24GiB?"]),
]


@pytest.mark.torch
@pytest.mark.parametrize("arguments, parts", BAD_INPUT, ids=[" ".join(arguments)[:50] for arguments, _ in BAD_INPUT])
def test_bad_input_is_one_line_with_value_and_remedy(arguments, parts, planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("BROKEN").mkdir()
    Path("BROKEN", "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": -1}')
    Path("own.yaml").write_text("{beta: .nan, prefix_sharing: 'yes'}")
    result = planned("--prompt", "100", *arguments)
    assert result.returncode == 2 and result.stderr.startswith("plan: ") and result.stderr.count("\n") == 1, result
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.mark.torch
def test_adapters_are_planned_as_the_settings_have_them(planned, tmp_path):
    """Fewer target modules take less, dropout's masks more, and no prompt is shared with dropout."""
    own = {"use_peft": True, "lora_target_modules": ["q_proj"], "lora_dropout": 0.0, "num_generations": 4}

    def predicted(**changed):
        profile, path = tmp_path / "own.yaml", tmp_path / "plan.json"
        profile.write_text(yaml.safe_dump(own | changed))
        words = ("--model", "tiny-qwen3", "--profile", profile, "--prompt", 300, "--arms", "stock,shared")
        result = planned(*words, "--json", path)
        if result.returncode:
            return result.stderr.splitlines()[-1]
        plans = json.loads(path.read_text())["predictions"]
        return len(plans), {phase["phase"]: phase["total"] for phase in plans[0]["phases"]}

    (_, few), (_, every) = predicted(), predicted(lora_target_modules="all-linear")
    assert few["optimizer"] < every["optimizer"]
    (both, kept), (alone, dropped) = (
        predicted(lora_dropout=dropout, gradient_checkpointing=False) for dropout in (0.0, 0.1)
    )
    assert kept["train"] < dropped["train"] and (both, alone) == (2, 1)
    assert "['no_such_layer']" in predicted(lora_target_modules=["no_such_layer"])


@pytest.mark.torch
def test_a_size_as_it_is_sold_is_taken_with_a_hint(planned):
    """PyTorch sees up to a tenth less, so a plan for it could say that something fits which does not."""
    sees = "of a card that is sold with 24, PyTorch sees 21.9 on A10, A10G, L4; 23.5 on RTX 4090; 23.7 on RTX 3090"
    assert size_as_sold("24GB") == f"--device-memory 24GB: 24GB is 22.35 GiB; {sees}: write that, in GiB"
    words = ("--model", "qwen3-0.6b", "--completion", "8", "--k", "2", "--arms", "stock", "--device-memory", "24GiB")
    assert planned(*words, "--prompt", "8").stderr.startswith(f"--device-memory 24GiB: {sees}: write that, in GiB\n")


POSITIONS = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=10**6))


NUMBERS = dict(k=(2, 12), rows=(1, 24), prompts=(1, 4), accumulation=(1, 12), new=(2, 40))


@given(**{name: st.integers(*bounds) for name, bounds in NUMBERS.items()})
def test_any_k_makes_batches_that_a_trainer_accepts_with_as_many_prompts(k, rows, prompts, accumulation, new):
    steps = max(1, prompts * k // rows)
    batches = dict(per_device_train_batch_size=rows, steps_per_generation=steps)
    setup = Setup(100, num_generations=k, gradient_accumulation_steps=accumulation, **batches)
    assume(rows * steps % k == 0)
    changed = setup.with_k(new)
    for accepted in (changed, changed.arm("shared"), changed.arm("stock-accumulate")):
        check(accepted, POSITIONS)
    assert changed.generation_rows // new == setup.generation_rows // k, "as many prompts"
    assert rows % k == 0 or changed.per_device_train_batch_size <= rows


@pytest.mark.torch
def test_the_simulation_calls_the_models_as_a_real_training_does(probe):
    calls = probe("model_calls")
    assert len(calls) == 9
    for case, (trained, simulated) in calls.items():
        assert trained == simulated, case
    models = {case: {call[0] for call in trained} for case, (trained, _) in calls.items()}
    assert models["shared-one"] == {"policy", "reference", "reward model", "head"}
    assert models["shared-lora"] == {"policy", "head"}
    assert calls["shared-one"][0] != calls["stock"][0], "an empty test"


@pytest.mark.torch
@pytest.mark.parametrize("arm", ["stock-accumulate", "shared"])
def test_planning_takes_no_memory_for_the_masks_of_long_prompts(arm, forked):
    """Of 60,000 tokens, a mask of numbers takes 7 GB."""
    result = forked("plan_masks", arm)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) < 2 * 1024**3


@pytest.mark.slow
@pytest.mark.torch
def test_few_layers_and_few_passes_tell_what_many_take(forked):
    """The short cuts of the simulation against the whole one, byte for byte but for bookkeeping tensors."""
    result = forked("plan_extended")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 12 * 5
    for _, _, *sizes in rows:
        short, whole, host_short, host_whole = map(int, sizes)
        assert abs(short - whole) <= 1024 and abs(host_short - host_whole) <= 1024, result.stdout
    on_host = {(name, phase) for name, phase, *_, host in rows if int(host)}
    assert on_host == {("stock-offloaded", "train"), ("passes-offloaded", "train")}
