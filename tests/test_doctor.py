"""The doctor's settings are trained with, and what is refused says why."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import resolve
from experiments.plan import doctor
from experiments.workload import data, models

ROOT = Path(__file__).resolve().parent.parent


def run(module, *arguments, **environment):
    command = [sys.executable, "-W", "ignore", "-m", f"experiments.{module}", *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)


@pytest.mark.torch
def test_what_the_doctor_writes_trains_and_its_record_can_be_read_again(tmp_path):
    """A model that does not fit, the YAML that does, a training with it, and the doctor on that training's folder."""
    policy, reward, _ = models.prepare(resolve("stock", 2, "test", "cpu"), data.load_documents("builtin"))
    fits, out = tmp_path / "fits.yaml", tmp_path / "out"
    result = run(
        "plan.doctor",
        "--model",
        policy,
        "--prompt",
        512,
        "--completion",
        16,
        "--k",
        4,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--device-memory",
        "14MiB",
        "--reserve",
        "0",
        "--output",
        fits,
        "--reward-model",
        reward,
        "--offload-reward",
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    text = fits.read_text()
    assert "prefix_sharing: true" in text and "offload_reward: true" in text and "MiB" not in text
    assert "Trains the same as before" in result.stdout
    peaks = [float(line.split()[0]) for line in result.stdout.splitlines() if "trains " in line]
    assert peaks == sorted(peaks) and len(peaks) > 5, "each change alone, in order of effect"

    result = run(
        "launch",
        fits,
        "--max_steps",
        2,
        "--output_dir",
        out,
        "--prompt_tokens",
        512,
        "--logging_steps",
        1,
        "--save_strategy",
        "no",
        "--report_to",
        "none",
        "--disable_tqdm",
        "true",
        "--offload_reference",
        "true",
        MODEL_PATH=policy,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "rewards/" in result.stdout and "letter_reward" not in result.stdout
    for metric in ("mem_alloc_mb", "mem_max_alloc_mb", "mem_batch_share", "mem_peak/train_mb", "mem_peak/generate_mb"):
        assert metric in result.stdout
    record = json.loads((out / "memory.json").read_text())
    assert record["arguments"]["prefix_sharing"] is True and record["prompt_tokens"] == 512
    assert record["host_allocator"] == "system"
    with (out / "memory_phases.csv").open(newline="") as file:
        assert {"generate", "score", "train", "optimizer"} <= {row["phase"] for row in csv.DictReader(file)}

    setup, hf_config, measured, _ = doctor.read_run(out)
    assert (setup.prompt_tokens, setup.num_generations, setup.dtype) == (512, 4, "float32")
    assert setup.offload_reference and setup.offload_reward and setup.reward_model == str(reward)
    assert hf_config.vocab_size == 512 and max(measured.values()) > 100 * 2**20


def test_a_run_of_the_harness_can_be_read():
    setup, hf_config, _, budget = doctor.read_run(ROOT / "results/reference-cpu-2-cores/shared_cpu_k8_r0")
    assert (setup.num_generations, setup.prefix_sharing, setup.completions_per_forward) == (8, True, 2)
    assert hf_config.vocab_size == 18992 and budget == 4 * 2**30


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["run folder", "--model"]),
        (["--model", "qwen3-8b", "--prompt", "64"], ["--device-memory"]),
        (["--model", "qwen3-8b", "--device-memory", "24GiB"], ["--prompt"]),
        (["no/such/folder"], ["no/such/folder", "memory.json", "run.json"]),
        (["results/reference-cpu-2-cores/classic-lean_cpu_k2_r0"], ["classic-lean", "--arm stock"]),
    ],
)
def test_the_doctor_says_what_is_missing(arguments, parts, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert doctor.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("doctor: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error
