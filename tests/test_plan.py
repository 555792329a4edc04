"""The planner: predictions beside measurements, what fits, and what is refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.arms import ARMS
from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.errors import ConfigError
from rloo_memory.plan import __main__ as plan
from rloo_memory.plan.accuracy.cards import cards, size_as_sold
from rloo_memory.plan.accuracy.reserve import FIXED, OUTSIDE, Room
from rloo_memory.plan.options import room_of
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.scale_up.sharding import spread
from rloo_memory.plan.setups import ARM_NAMES, OLDER, Setup, check


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


NOT_A_CONFIG = {
    "text": "not json",
    "half": '{"model_type": "qwen3", "num_hidden_layers": -1}',
}
BAD_INPUT = [
    (["--model", "Qwen/Qwen3-9B"], ["Qwen3-9B", "did you mean", "hub:"]),
    (["--model", "./nofolder"], ["no folder ./nofolder", "config.json"]),
    (["--model", "qwen3-8b", "--profile", "single_gpu_24g"], ["single_gpu_24g", "did you mean single_gpu_24gb"]),
    (["--model", "qwen3-8b", "--k", "1"], ["--k is 1", "at least 2"]),
    (["--model", "qwen3-8b", "--k", "9" * 30], ["--k is 9999", "no training"]),
    (["--model", "qwen3-8b", "--k", "1000000"], ["--k 1000000", "134,217,728 tokens"]),
    (["--model", "qwen3-8b", "--lora", "-4"], ["--lora is -4", "at least 0"]),
    (["--model", "qwen3-8b", "--beta", "nan"], ["--beta is nan", "finite"]),
    (["--model", "qwen3-8b", "--prompts", "0"], ["--prompts is 0", "at least 1"]),
    (["--model", "qwen3-8b", "--completion", "60000"], ["--prompt 100", "--completion 60000", "60100", "40960"]),
    (["--model", "qwen3-8b", "--bits", "4"], ["4-bit", "--lora"]),
    (["--model", "qwen3-8b", "--optim", "adam8"], ["adam8", "adamw_8bit"]),
    (["--model", "qwen3-8b", "--dtype", "int8"], ["int8", "bfloat16"]),
    (["--model", "qwen3-8b", "--device-memory", "24 bananas"], ["24 bananas", "24GiB"]),
    (["--model", "qwen3-8b", "--largest", "k"], ["--device-memory"]),
    (["--model", "qwen3-8b", "--arms", "stock,acumulate"], ["acumulate", "stock-accumulate"]),
    (["--model", "qwen3-8b", "--arms", "stock-tokens"], ["stock-tokens", "--tokens-per-forward"]),
    (["--model", "qwen3-8b", "--json", "/no/such/folder/plan.json"], ["/no/such/folder/plan.json", "cannot write"]),
    (["--model", "qwen3-8b", "--accelerate", "nothing.yaml"], ["nothing.yaml"]),
    (["--model", "qwen3-8b", "--reward-model", "./nofolder"], ["no folder ./nofolder"]),
    # All that is wrong at once
    (["--model", "x/y", "--k", "0", "--beta", "nan", "--device-memory", "24"], ["x/y", "--k", "--beta", "24GiB?"]),
    *((["--model", f"CONFIGS/{name}"], [f"CONFIGS/{name}"]) for name in NOT_A_CONFIG),
]


@pytest.mark.torch
@pytest.mark.parametrize("arguments, parts", BAD_INPUT, ids=[" ".join(arguments)[:50] for arguments, _ in BAD_INPUT])
def test_bad_input_is_one_line_with_value_and_remedy(arguments, parts, capsys, tmp_path):
    for name, text in NOT_A_CONFIG.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    arguments, parts = ([x.replace("CONFIGS", str(tmp_path)) for x in each] for each in (arguments, parts))
    assert plan.main(["--prompt", "100", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and error.count("\n") == 1, error
    assert all(part in error for part in parts), error


BAD_SETTINGS = [
    ({"beta": float("nan"), "prefix_sharing": "maybe"}, ["beta is nan", "prefix_sharing: Truthy value", "yes/no"]),
    ({"use_peft": True, "lora_dropout": 1.5}, ["lora_dropout is 1.5", "below 1"]),
    ({"num_generations": 3}, ["multiple of num_generations 3"]),
]


@pytest.mark.torch
@pytest.mark.parametrize("settings, parts", BAD_SETTINGS, ids=[str(settings) for settings, _ in BAD_SETTINGS])
def test_settings_of_a_wrong_kind_are_one_line(settings, parts, capsys, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "qwen3-8b", "max_prompt_tokens": 64} | settings))
    assert plan.main(["--profile", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and error.count("\n") == 1, error
    assert all(part in error for part in parts), error


@pytest.mark.torch
def test_adapters_are_planned_as_the_settings_have_them(tmp_path, capsys):
    """Fewer target modules take less, dropout's masks more, and no prompt is shared with dropout."""
    own = {"use_peft": True, "lora_target_modules": ["q_proj"], "lora_dropout": 0.0, "num_generations": 4}
    peaks = {}
    for name, changed in {
        "few": {},
        "all": {"lora_target_modules": "all-linear"},
        "dropout": {"lora_dropout": 0.1, "gradient_checkpointing": False},
        "none": {"gradient_checkpointing": False},
        "wrong": {"lora_target_modules": ["no_such_layer"]},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(own | changed))
        json_file = tmp_path / f"{name}.json"
        arguments = ["--model", "tiny-qwen3", "--profile", str(tmp_path / f"{name}.yaml"), "--prompt", "300"]
        code = plan.main([*arguments, "--arms", "stock,shared", "--json", str(json_file)])
        error = capsys.readouterr().err
        if name == "wrong":
            assert code == 2 and "['no_such_layer']" in error.splitlines()[-1] and "Traceback" not in error
            continue
        assert code == 0, error
        predictions = {p["arm"]: p["phases"] for p in json.loads(json_file.read_text())["predictions"]}
        assert ("shared" in predictions) == (name != "dropout")
        assert ("would share its dropout" in error) == (name == "dropout")
        peaks[name] = {phase["phase"]: phase["total"] for phase in predictions["stock"]}
    assert peaks["few"]["optimizer"] < peaks["all"]["optimizer"]
    assert peaks["none"]["train"] < peaks["dropout"]["train"]


@pytest.mark.parametrize(
    "memory, reserve, parts",
    [
        ("9" * 400, "0.8GiB", ["--device-memory", "9999..."]),
        ("", "0.8GiB", ["--device-memory", "''", "24GiB"]),
        ("24", "0.8GiB", ["--device-memory 24 is 24 bytes", "did you mean 24GiB?"]),
        ("255MiB", "0.8GiB", ["255MiB", "256 MiB"]),
        ("5000TB", "0.8GiB", ["5000TB"]),
        ("24GiB", "30GiB", ["--reserve 30GiB", "24.00 GiB", "100MiB"]),
        ("24GiB", "24GiB", ["--reserve 24GiB"]),
        ("24GiB", "much", ["--reserve", "much"]),
    ],
)
def test_sizes_that_no_device_has_are_refused(memory, reserve, parts):
    with pytest.raises(ConfigError) as error:
        room_of(memory, reserve)
    assert all(part in str(error.value) for part in parts) and len(str(error.value)) < 200, error.value


def test_a_device_less_its_reserve_is_what_is_left():
    assert room_of("24GiB", "0.8GiB") == Room(24 * 2**30 - int(0.8 * 2**30)) and room_of(None, "x") is None
    assert room_of("256MiB", "0").size == 2**28
    assert room_of("24GiB", None) == Room(24 * 2**30 - OUTSIDE, FIXED)


def test_what_fits_has_room_for_what_the_allocator_wastes_and_what_is_short_has_none_for_its_tensors():
    phase = PredictedPeak("train", 100, {"parameters": 40, "gradients": 20, "activations": 40}, 0)
    assert Room(113, 0.33).holds([phase]) and not Room(112, 0.33).holds([phase]) and Room(100).holds([phase])
    assert Room(112, 0.33).short([phase]) < 0 < Room(99, 0.33).short([phase])
    verdicts = [plan.fits(Prediction("stock", Setup(10), [phase]), Room(size, 0.33)) for size in (99, 112, 130)]
    assert [verdict.split()[0] for verdict in verdicts] == ["short", "just", "yes"]


@pytest.mark.torch
def test_a_size_as_it_is_sold_is_taken_with_a_hint(planned):
    """PyTorch sees up to a tenth less, so a plan for it could say that something fits which does not."""
    sees = "of a card that is sold with 24, PyTorch sees 21.9 on A10, A10G, L4; 23.5 on RTX 4090; 23.7 on RTX 3090"
    assert size_as_sold("24GB") == f"--device-memory 24GB: 24GB is 22.35 GiB; {sees}: write that, in GiB"
    assert "79.1 on H100; 79.2 on A100" in size_as_sold("80 gib")
    assert size_as_sold("23GB") == "--device-memory 23GB: 23GB is 21.42 GiB"
    assert {size_as_sold(text) for text in ("23.5GiB", "25769803776", "24000MiB")} == {None}
    words = ("--model", "qwen3-0.6b", "--completion", "8", "--k", "2", "--arms", "stock", "--device-memory", "24GiB")
    assert planned(*words, "--prompt", "8").stderr.startswith(f"--device-memory 24GiB: {sees}: write that, in GiB\n")
    assert "sold" not in planned(*words, "--prompt", "8", "--device", "cpu").stderr
    assert planned(*words, "--prompt", "0").stderr.count("\n") == 1, "a refusal is one line"


def test_what_pytorch_sees_of_a_card_is_less_than_it_is_sold_with():
    assert all(0.9 * card.sold < card.seen < card.sold for card in cards() if card.seen)
    sizes = [card.seen or card.sold for card in cards()]
    assert sizes == sorted(sizes), "the page lists them in this order"


def test_the_planners_arms_are_those_of_the_harness_but_for_the_token_budget():
    assert set(ARM_NAMES) - set(ARMS) == {"stock-tokens", *OLDER}
    with pytest.raises(ConfigError, match="accumulate.*stock-accumulate"):
        Setup(100).arm("accumulate")


POSITIONS = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=10**6))


@given(
    k=st.integers(2, 12),
    rows=st.integers(1, 24),
    prompts=st.integers(1, 4),
    accumulation=st.integers(1, 12),
    new=st.integers(2, 40),
)
def test_any_k_makes_batches_that_a_trainer_accepts_with_as_many_prompts(k, rows, prompts, accumulation, new):
    steps = max(1, prompts * k // rows)
    setup = Setup(
        100,
        num_generations=k,
        per_device_train_batch_size=rows,
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulation,
    )
    if rows * steps % k:
        return
    changed = setup.with_k(new)
    check(changed, POSITIONS)
    assert changed.generation_rows // new == setup.generation_rows // k, "as many prompts"
    if rows % k:
        assert changed.per_device_train_batch_size <= rows
    check(changed.arm("shared"), POSITIONS)
    check(changed.arm("stock-accumulate"), POSITIONS)


def test_half_of_k_halves_what_is_generated_also_row_by_row():
    setup = Setup(100).arm("stock-accumulate")
    assert setup.generation_rows == 8
    half = setup.with_k(4)
    assert (half.generation_rows, half.per_device_train_batch_size, half.rows_per_update) == (4, 1, 4)


def test_the_buckets_of_ddp_are_there_in_every_phase():
    setup = Setup(100, num_devices=2)
    for phase in ("generate", "score", "train", "optimizer"):
        assert spread(setup, (0, 0), 70, phase, {"activations": 5}) == {"activations": 5, "other": 70}
    assert spread(setup, (0, 0), 70, "load", {"activations": 5}) == {"activations": 5}


@pytest.mark.torch
def test_the_simulation_calls_the_models_as_a_real_training_does(probe):
    calls = probe("model_calls")
    assert len(calls) == 12
    for case, (trained, simulated) in calls.items():
        assert trained == simulated, case
    models = {case: {call[0] for call in trained} for case, (trained, _) in calls.items()}
    assert models["shared-one"] == {"policy", "reference", "reward model", "head"}
    assert models["shared-lora"] == {"policy", "head"}
    assert calls["shared"][0] != calls["stock"][0], "an empty test"


@pytest.mark.slow
@pytest.mark.torch
def test_what_the_simulation_counts_by_rule(probe):
    """Rules that no training on a CPU shows."""
    result = probe("plan_rules")
    assert result["reward rows"] == {"stock": 8, "stock-tokens": 3, "shared": 1, "less than a row": 1}
    assert result["offloaded from 1,024 bytes on"] == [False, True, False, True]
    assert result["dropout keeps a byte an element"] == 1


@pytest.mark.torch
def test_a_device_smaller_than_the_weights_is_told_by_how_much(planned):
    words = (
        "--model tiny-qwen3 --prompt 64 --completion 16 --k 2 --dtype float32 --device-memory 256MiB "
        "--reserve 248MiB --arms shared"
    )
    result = planned(*words.split())
    assert result.returncode == 0, result.stderr[-2000:]
    assert "The weights alone exceed 256MiB less 248MiB reserved by" in result.stdout


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
    assert len(rows) == 17 * 5 + 1
    for _, _, *sizes in rows:
        short, whole, host_short, host_whole = map(int, sizes)
        assert abs(short - whole) <= 1024 and abs(host_short - host_whole) <= 1024, result.stdout
    on_host = {(name, phase) for name, phase, *_, host in rows if int(host)}
    assert on_host == {("stock-offloaded", "train"), ("passes-offloaded", "train"), ("stock-offloaded", "forward")}


@pytest.mark.slow
@pytest.mark.torch
def test_with_offloading_it_is_the_host_that_grows_with_the_passes(tmp_path):
    """An 8B model, 56 completions of 512 tokens more, in passes of two: the inputs of their layers."""
    options = ("--prompt", 200, "--completion", 512, "--lora", 16, "--activation-offloading", "--arms", "shared")
    options += ("--tokens-per-forward", 2 * 513)
    trained = []
    for k in (8, 64):
        path = tmp_path / f"{k}.json"
        result = run("rloo_memory.plan", "--model", "Qwen/Qwen3-8B", *options, "--k", k, "--json", path)
        assert result.returncode == 0, result.stderr[-3000:]
        (prediction,) = json.loads(path.read_text())["predictions"]
        assert prediction["setup"]["tokens_per_forward"] == 2 * 513
        trained += [phase for phase in prediction["phases"] if phase["phase"] == "train"]
        assert f"shared, on the host at most: {trained[-1]['host'] / 2**30:.2f} (train)" in result.stdout
    few, many = trained
    inputs = 56 * 513 * 4096 * 2 * 36  # tokens with the prompt's last, hidden size, bfloat16, layers
    assert inputs <= many["host"] - few["host"] <= 1.1 * inputs
    assert many["total"] - few["total"] <= 0.2 * inputs


@pytest.mark.torch
def test_in_float32_grouped_keys_hold_all_scores_on_cuda(planned, tmp_path):
    """Scores, probabilities and a byte for each: in the softmax of generation's first pass. tests/cuda measures it."""
    words = f"--model tiny-qwen3 --profile {tmp_path}/profile.yaml --prompt 1000 --completion 8 --arms stock"
    held = {}
    for bf16 in (False, True):
        (tmp_path / "profile.yaml").write_text(f"dtype: float32\nbf16: {bf16}\n")
        assert planned(*words.split(), "--json", tmp_path / "plan.json").returncode == 0
        (prediction,) = json.loads((tmp_path / "plan.json").read_text())["predictions"]
        rows = prediction["setup"]["per_device_train_batch_size"] * prediction["setup"]["steps_per_generation"]
        scores = 4 * rows * 1000**2 * 4  # heads of tiny-qwen3, tokens by tokens, bytes
        (kinds,) = (phase["kinds"] for phase in prediction["phases"] if phase["phase"] == "generate")
        held[bf16] = kinds["activations"] / scores
    assert 2.25 <= held[False] < 3 and held[True] < 1
