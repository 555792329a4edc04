"""The planner asked from Python, and the launcher that asks it before it trains."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from small_profile import small_profile

from rloo_memory import device, models
from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import command_line, gate
from rloo_memory.launch.dataset import Lengths
from rloo_memory.plan import __main__ as plan
from rloo_memory.plan import ask
from trl import RLOOConfig

MIB = 2**20
TRAIN = ["profile.yaml"]
PROFILE = small_profile(8, 16, prompt_tokens=160, max_steps=1, gradient_checkpointing=True, output_dir="out")


@pytest.fixture
def here(policy, tmp_path, monkeypatch):
    """A folder with a profile that trains the policy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", policy)
    (tmp_path / "profile.yaml").write_text(PROFILE)
    return tmp_path


def test_the_reference_beside_an_object_is_planned_in_the_dtype_that_it_is_loaded_in(planner):
    """As `model_init_kwargs` say, or as the policy. On other releases: test_releases.py."""
    config = models.named_config("tiny-qwen3")
    policy = models.auto_class(config).from_config(config, dtype="bfloat16")
    args = dict(max_completion_length=8, num_generations=2, per_device_train_batch_size=2)
    for settings, bytes_each in (({}, 2), ({"model_init_kwargs": {"dtype": "float32"}}, 4)):
        found = ask.predict(args | settings, policy, 16).phases[0].kinds
        assert found["reference"] == pytest.approx(found["parameters"] * bytes_each / 2, rel=0.01), settings


def test_what_python_asks_is_what_the_command_says(planner, tmp_path):
    """For a model's config, with adapters from a LoraConfig."""
    args = RLOOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, num_generations=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=1, max_completion_length=16, optim="adamw_torch", beta=0.05, temperature=1.0,
    )  # fmt: skip
    settings = {"dtype": "bfloat16", "prefix_sharing": True, "tokens_per_forward": 2 * 17}
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    found = ask.predict(args, models.named_config("tiny-qwen3"), 64, peft_config=lora, settings=settings)
    words = "--prompt 64 --completion 16 --k 4 --tokens-per-forward 34 --lora 4 --optim adamw_torch --arms shared"
    assert plan.main(["--model", "tiny-qwen3", *words.split(), "--json", str(tmp_path / "plan.json")]) == 0
    (command,) = json.loads((tmp_path / "plan.json").read_text())["predictions"]
    assert [asdict(phase) for phase in found.phases] == command["phases"]
    settings = {"num_generations": 2, "per_device_train_batch_size": 3, "steps_per_generation": 1}
    with pytest.raises(ConfigError, match="^per_device_train_batch_size 3 .* is not a multiple of num_generations 2"):
        ask.predict(settings, "tiny-qwen3", 32)


@pytest.mark.slow
def test_a_training_that_does_not_fit_is_refused_with_settings_that_do(
    here, policy, planner, monkeypatch, capsys, refused, forbid_loading
):
    """With these settings it trains, and anyway it trains, too; the record has the prediction beside the peak."""
    monkeypatch.setattr(gate, "available_bytes", lambda device: 10**12)
    launched, config, model = command_line.parse(TRAIN)
    settings = ask.settings_of(model) | ask.settings_of(launched) | ask.settings_of(config)
    expected = ask.predict(settings, policy, 160, device="cpu")
    limit = int(0.9 * expected.peak.total)
    monkeypatch.setattr(gate, "available_bytes", lambda device: limit)
    with monkeypatch.context() as patch:
        forbid_loading(patch)
        said = f"launch: predicted peak {expected.peak.total / 2**30:.2f} GiB in phase {expected.peak.phase} exceeds"
        line = refused(TRAIN, said, "--anyway trains all the same")
    remedy = re.search(r"; (--.*) needs ([\d.]+) GiB \((trains the same .*)\);", line)
    assert remedy, line
    for words in (remedy[1].replace(",", "").split(), ["--anyway"]):
        code, (out, err) = launch.main([*TRAIN, *words]), capsys.readouterr()
        assert code == 0, err
        record = json.loads(Path("out", "memory.json").read_text())
        assert set(record["predicted_peaks"]) == {"load", "generate", "score", "train", "optimizer"}
        fits = max(record["predicted_peaks"].values()) <= limit
        assert fits == (words != ["--anyway"]), words
        assert re.search(r"\npeak .*; predicted for it [\d.]+ of tensors\n", out), out


def test_the_doctors_command_is_one_that_a_shell_takes():
    config = SimpleNamespace(device=torch.device("cpu"))
    command = gate.doctor_of("my fits.yaml", "my model", Lengths(9, 9, ((8, 6),)), config, "my run")
    assert shlex.split(command)[2:8] == ["--profile", "my fits.yaml", "--model", "my model", "--prompt", "9"]
    assert command.endswith(" --device cpu --calibration 'my run'")


@pytest.mark.slow
def test_what_cannot_be_predicted_is_said_and_trained(here, planner, capsys):
    assert launch.main([*TRAIN, "--optim", "rmsprop"]) == 0
    assert "memory  not predicted: optim 'rmsprop' " in capsys.readouterr().out
    assert json.loads(Path("out", "memory.json").read_text())["predicted_peaks"] == {}


def test_accelerates_file_decides_where_the_settings_have_no_mixed_precision(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = SimpleNamespace(bf16=False, fp16=False, device=torch.device("cpu"), world_size=1)
    assert gate.devices_here(config)["bf16"]


def test_what_is_free_is_what_the_host_and_its_cgroup_have(monkeypatch):
    files = {
        "/proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:    {500 * 1024} kB\n",
        "/sys/fs/cgroup/memory.max": f"{600 * MIB}\n",
        "/sys/fs/cgroup/memory.current": f"{300 * MIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {100 * MIB}\nactive_file 7\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert device.available_bytes("cpu:0") == 400 * MIB
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert device.available_bytes("cpu") == 500 * MIB
