"""The planner: predictions beside measurements, what fits, and what is refused."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.plan import __main__ as plan

ROOT = Path(__file__).resolve().parent.parent


def run(module, *arguments):
    command = [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.torch
def test_every_phase_is_predicted_within_ten_percent_of_a_real_training(tmp_path):
    """Some of the cases; all are in results/*/plan_check.csv."""
    cases = "stock-k8,shared-k8"
    result = run(
        "evidence.planner_check", "--device", "cpu", "--results", tmp_path, "--machine", "here", "--cases", cases
    )
    assert result.returncode == 0, result.stderr[-3000:]
    with (tmp_path / "here" / "plan_check.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4
    wrong = [row for row in rows if abs(float(row["error"])) > 0.1]
    assert not wrong, "\n".join(f"{row['case']} {row['phase']}: {row['error']}" for row in wrong)
    measured = {(row["case"], row["phase"]): int(row["measured_bytes"]) for row in rows}
    assert measured["shared-k8", "train"] < measured["stock-k8", "train"], "the cases do not differ: an empty test"


@pytest.mark.torch
def test_a_large_model_is_planned_without_weights(tmp_path):
    path = tmp_path / "plan.json"
    result = run(
        "plan",
        "--model",
        "Qwen/Qwen3-1.7B",
        "--prompt",
        2000,
        "--completion",
        256,
        "--k",
        4,
        "--device-memory",
        "12GiB",
        "--arms",
        "stock,shared",
        "--json",
        path,
        "--chart",
        tmp_path / "plan.png",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    result_file = json.loads(path.read_text())
    peaks = {p["arm"]: max(phase["total"] for phase in p["phases"]) for p in result_file["predictions"]}
    weights = result_file["predictions"][0]["phases"][0]["kinds"]["parameters"]
    assert 1.7e9 * 2 < weights < 1.75e9 * 2  # its published number of parameters, in bfloat16
    assert weights < peaks["shared"] < peaks["stock"]
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.torch
def test_the_longest_prompt_that_fits_is_longer_with_shared_prompts():
    result = run(
        "plan",
        "--model",
        "tiny-qwen3",
        "--prompt",
        1000,
        "--completion",
        64,
        "--k",
        4,
        "--dtype",
        "float32",
        "--device-memory",
        "128MiB",
        "--reserve",
        "0",
        "--largest",
        "prompt",
        "--arms",
        "stock,shared",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = [line for line in result.stdout.splitlines() if ": largest prompt" in line]
    largest = {line.split(":")[0]: int(line.split()[-1]) for line in found}
    assert 1000 <= largest["stock"] < largest["shared"]


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--model", "Qwen/Qwen3-9B"], ["Qwen3-9B", "did you mean", "hub:"]),
        (["--model", "qwen3-8b", "--profile", "single_gpu_24g"], ["single_gpu_24g", "did you mean single_gpu_24gb"]),
        (["--model", "qwen3-8b", "--k", "1"], ["num_generations is 1", "at least 2"]),
        (["--model", "qwen3-8b", "--completion", "60000"], ["60100", "40960"]),
        (["--model", "qwen3-8b", "--bits", "4"], ["4-bit", "--lora"]),
        (["--model", "qwen3-8b", "--optim", "adam8"], ["adam8", "adamw_8bit"]),
        (["--model", "qwen3-8b", "--completions-per-forward", "9"], ["completions_per_forward 9", "k=8"]),
        (["--model", "qwen3-8b", "--device-memory", "24 bananas"], ["24 bananas", "32GiB"]),
        (["--model", "qwen3-8b", "--largest", "k"], ["--device-memory"]),
    ],
)
def test_bad_input_is_one_line_with_value_and_remedy(arguments, parts, capsys):
    assert plan.main(["--prompt", "100", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and error.count("\n") == 1, error
    assert all(part in error for part in parts), error


def plan_of_tiny(model_type, folder, *arguments, **fields):
    """The planner's result for a tiny model of that type."""
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type](
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    ).save_pretrained(folder)
    return run("plan", "--model", folder, "--prompt", 200, "--completion", 32, "--k", 4, *arguments)


def planned_arms(result):
    return [line.split()[0] for line in result.stdout.split("\n\n")[0].splitlines()[2:]]


@pytest.mark.torch
@pytest.mark.parametrize(
    "model_type, fields",
    [
        ("gemma2", {}),  # soft-capped attention has no fused kernel
        ("deepseek_v3", dict(  # latent attention caches other states than it attends to
            kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, first_k_dense_replace=1,
            n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        )),
    ],
)  # fmt: skip
def test_models_with_another_kind_of_attention_are_planned(model_type, fields, tmp_path):
    result = plan_of_tiny(model_type, tmp_path, **fields)
    assert result.returncode == 0, result.stderr[-3000:]
    assert planned_arms(result) == ["stock", "accumulate", "shared"]


@pytest.mark.torch
def test_a_model_whose_prompts_cannot_be_shared_is_planned_without(tmp_path):
    reason = "does not go through `transformers.AttentionInterface`"
    result = plan_of_tiny("stablelm", tmp_path)
    assert result.returncode == 0 and reason in result.stderr, result.stderr[-3000:]
    assert planned_arms(result) == ["stock", "accumulate"]
    alone = plan_of_tiny("stablelm", tmp_path, "--arms", "shared")
    assert alone.returncode == 2 and "Traceback" not in alone.stderr
    assert alone.stderr.splitlines()[-1].startswith("plan: ") and reason in alone.stderr.splitlines()[-1]


@pytest.mark.torch
def test_a_device_smaller_than_the_weights_is_told_by_how_much():
    result = run(
        "plan",
        "--model",
        "tiny-qwen3",
        "--prompt",
        64,
        "--completion",
        16,
        "--k",
        2,
        "--dtype",
        "float32",
        "--device-memory",
        "8MiB",
        "--reserve",
        "0",
        "--arms",
        "shared",
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "The weights alone exceed 8MiB by" in result.stdout


@pytest.mark.torch
def test_few_layers_and_few_passes_tell_what_many_take():
    """The short cuts of the simulation against the whole one, byte for byte but for bookkeeping tensors."""
    result = subprocess.run(
        [sys.executable, "tests/probes/plan_extended.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 3 * 5
    assert all(abs(int(short) - int(whole)) <= 1024 for _, _, short, whole in rows), result.stdout
