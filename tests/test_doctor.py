"""The doctor's settings are trained with, and what is refused says why."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.config import resolve
from experiments.plan import doctor
from experiments.settings import profiles
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


@pytest.mark.torch
def test_the_memory_callback_works_with_a_trainer_without_rewards(probe):
    policy, _, _ = models.prepare(resolve("stock", 2, "test", "cpu"), data.load_documents("builtin"))
    record = probe("other_trainer", policy)
    assert set(record["peaks"]) == {"train", "optimizer"} and min(record["peaks"].values()) > 100 * 2**20
    assert record["reward_model"] is None and record["arguments"]["offload_reference"] is False


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


YAML_ERRORS = {
    "prefix_sharin: true": ["line 1", "prefix_sharin", "did you mean 'prefix_sharing'"],
    "beta: 0.0\nload_in_4bit: true\n": ["line 2", "load_in_4bit needs use_peft"],
    "use_peft: true\nload_in_4bit: true\nload_in_8bit: true\n": ["line 2", "contradicts load_in_8bit (line 3)"],
    "beta: 0.1\nbeta: 0.2\n": ["line 2", "'beta'", "first on line 1"],
    "beta: [0.1\n": ["line 2"],
    "completions_per_forward: 2\n": ["line 1", "needs prefix_sharing"],
    "vllm_gpu_memory_utilization: 0.3\n": ["line 1", "needs use_vllm"],
    "- beta\n": ["name: value"],
}


@pytest.mark.torch
def test_mistakes_in_a_profile_are_named_with_line_and_key(tmp_path):
    """One process: the settings are those of the fork."""
    for i, text in enumerate(YAML_ERRORS):
        (tmp_path / f"{i}.yaml").write_text(text)
    code = (
        "import sys, pathlib\nfrom experiments.settings.profiles import load_profile, names\n"
        "from experiments.config import ConfigError\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.yaml')):\n"
        "    try:\n        print(load_profile(str(path)))\n    except ConfigError as error:\n        print(error)\n"
        "for name in names():\n    assert load_profile(name)['learning_rate'] > 0, name\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert len(lines) == len(YAML_ERRORS)
    for line, parts in zip(lines, YAML_ERRORS.values(), strict=True):
        assert all(part in line for part in parts), (line, parts)


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments, model, parts",
    [
        (["single_gpu_24gb"], "Qwen/Qwen3-8B", ["not a folder", "hub:Qwen/Qwen3-8B", "random:qwen3-8b"]),
        (["balanced", "--max_step", "2"], "", ["--max_step", "did you mean --max_steps"]),
        (["balanced", "--algorithm", "ppo"], "", ["ppo", "rloo or grpo"]),
        (["constrained", "--use_cpu"], "", ["activation_offloading", "no GPU", "--activation_offloading false"]),
        (["balanced", "--offload_reward", "true"], "", ["offload_reward", "'letters' is a function"]),
        (["balanced", "--reward", "no/such"], "", ["no/such", "module:function", "folder"]),
        (["constraind"], "", ["constraind", "did you mean constrained"]),
        (["--max_steps", "2"], "", ["name a profile first"]),
    ],
)
def test_the_launcher_refuses_before_any_model_loads(arguments, model, parts):
    result = run("launch", *arguments, MODEL_PATH=model)
    assert result.returncode == 2, result.stderr[-2000:]
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("launch: ") and all(part in line for part in parts), line


@pytest.mark.torch
def test_a_model_kept_on_the_host_leaves_the_device_when_the_policy_trains(monkeypatch):
    import torch

    from experiments.launch.offload import keep_on_host

    calls = []
    hook = SimpleNamespace(offload=lambda: calls.append("offload"))
    monkeypatch.setattr("accelerate.cpu_offload_with_hook", lambda model, device: (model, hook))
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, device="cpu")
    trainer = SimpleNamespace(accelerator=accelerator, model=torch.nn.Linear(2, 2), is_fsdp_enabled=False)
    keep_on_host(trainer, torch.nn.Linear(2, 2))
    with torch.no_grad():
        trainer.model(torch.ones(1, 2))  # generation, scoring
    assert calls == []
    trainer.model(torch.ones(1, 2))
    assert calls == ["offload"]


@pytest.mark.torch
def test_every_profile_trains_a_tiny_model_on_a_cpu(tmp_path):
    policy, _, _ = models.prepare(resolve("stock", 2, "test", "cpu"), data.load_documents("builtin"))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/probes/profiles.py", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL_PATH": str(policy)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    trained = json.loads(result.stdout.splitlines()[-1])
    assert sorted(trained) == profiles.names()
    assert {name: run["code"] for name, run in trained.items()} == dict.fromkeys(trained, 0)
    gradients = re.findall(r"'grad_norm': '([^']+)'", result.stdout)
    assert len(gradients) == len(trained) and all(float(gradient) > 0 for gradient in gradients), gradients
    for name, run in trained.items():
        settings = profiles.load_profile(name)
        assert run["bits"] == (4 if settings.get("load_in_4bit") else 16), name
        assert run["arguments"]["optim"] == settings["optim"], name
        assert (run["trained"] < 1) == settings.get("use_peft", False), name


def test_every_line_of_a_profile_says_what_it_buys_or_costs():
    for name in profiles.names():
        lines = profiles.profile_path(name).read_text().splitlines()
        bare = [x for x in lines if x and "#" not in x and not x.startswith(("learning_rate", "logging"))]
        assert not bare, (name, bare)
