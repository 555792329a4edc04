"""Measurements that `run_gpu.sh` runs, on the CPU at small size: nothing may fail for the first time on a GPU."""

import csv
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.config import ROOT
from experiments.evidence import exactness
from rloo_memory import commit
from rloo_memory.plan.records import read_run
from tests.test_visualization import write_run
from visualization.load import PHASE_COLUMNS, SAMPLE_COLUMNS
from visualization.runs import GIB
from visualization.tables import render


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
@pytest.mark.torch
def test_lora_on_bfloat16_weights_trains_alike_with_and_without_sharing(train):
    """The first gradient differs by bfloat16's rounding, as stock's own does between batch sizes."""
    (code, stock, _, _), (other, shared, folder, _) = (train(arm, 4, scale="test-lora") for arm in ("stock", "shared"))
    assert code == other == 0
    left, right = stock["trace"][0], shared["trace"][0]
    assert left["reward"] == right["reward"] and left["grad_norm"] > 0.01
    assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=0.02)
    settings = read_run(folder).settings
    recorded = [settings[name] for name in ("lora_r", "dtype", "bf16", "prefix_sharing")]
    assert recorded == [4, "bfloat16", True, True]


@pytest.mark.slow
@pytest.mark.torch
def test_errors_and_attention_kernels_are_measured_on_the_device(tmp_path):
    result = run(
        sys.executable,
        "-m",
        "experiments.evidence.exactness",
        "--device",
        "cpu",
        "--results",
        tmp_path,
        "--machine",
        "x",
    )
    with (tmp_path / "x" / "exactness.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    stock, *shared = ([float(row[name]) for name in ("log_prob_error", "gradient_error")] for row in rows[:3])
    ratios = [mine / theirs for errors in shared for mine, theirs in zip(errors, stock, strict=True)]
    assert max(ratios) < 1.25, "four small batches: 1.03 where this was written, other processors round otherwise"
    assert result.returncode == (4 if max(ratios) > 1.1 else 0), result.stdout + result.stderr[-3000:]
    assert [row["precision"] for row in rows] == ["bfloat16"] * 3 + ["float32"] * 3
    assert all(0 < float(row["gradient_error"]) < 1e-5 for row in rows[3:])
    assert all(row["attention"] not in ("", "none") for row in rows)
    assert result.stdout.count("events profiled in") == 6, "a way and precision once"
    assert "shared, two a pass" in render("exactness", tmp_path / "x")


@pytest.mark.torch
def test_kernels_are_named_from_one_forward_without_a_backward(monkeypatch, capsys):
    import torch

    class Model(torch.nn.Module):
        def forward(self, input_ids, **settings):
            states = torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 16)] * 3, is_causal=True)
            forwards.append((torch.is_grad_enabled(), settings["way"]))
            return SimpleNamespace(log_probs=states.sum() * torch.ones(input_ids.shape))

    forwards, profilers = [], []
    profile_of = exactness.profile_of
    monkeypatch.setattr(exactness, "profile_of", lambda device: profilers.append(profile_of(device)) or profilers[0])
    batch = exactness.Batch(0, "cpu", vocab_size=20, prompt=4, completion=4, k=2)
    names = batch.kernels("cpu", Model(), nullcontext(), way="stock")
    assert names == "flash_attention_for_cpu" and forwards == [(False, "stock")]
    assert capsys.readouterr().out.startswith(f"{len(profilers[0].events())} events profiled in ")


def test_kernels_are_named_by_who_called_them():
    """Made-up events, as a GPU's are: sdpa calls the kernel that prefix sharing calls by itself."""

    def event(name, parent=None, device="CPU"):
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=SimpleNamespace(name=device))

    sdpa = event("aten::_scaled_dot_product_flash_attention")
    inside = event("aten::_flash_attention_forward", sdpa)
    kernel = event("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Params)", device="CUDA")
    stock = [sdpa, inside, kernel, event("aten::_scaled_dot_product_flash_attention_backward"), event("aten::mm")]
    assert exactness.attention_kernels(SimpleNamespace(events=lambda: stock)) == "[flash_fwd_kernel] flash_attention"
    mine = [event("aten::_flash_attention_forward", event("SharedPrefixAttention")), kernel]
    names = exactness.attention_kernels(SimpleNamespace(events=lambda: mine))
    assert names == "[flash_fwd_kernel] _flash_attention_forward"
    cudnn = event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", device="CUDA")
    assert exactness.attention_kernels(SimpleNamespace(events=lambda: [cudnn])).startswith(
        "[cudnn_generated_fort_native"
    )
    assert exactness.attention_kernels(SimpleNamespace(events=lambda: [event("aten::mm")])) == "none"


@pytest.mark.slow
def test_what_the_sampler_misses_is_measured_at_each_interval(tmp_path):
    result = run(
        sys.executable,
        "-m",
        "experiments.evidence.sampler_check",
        "--device",
        "cpu",
        "--scale",
        "test",
        "--k",
        "2",
        "--intervals",
        "0.02,0.1",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--results",
        tmp_path,
        "--machine",
        "x",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    with (tmp_path / "x" / "sampler.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["interval_s"]) for row in rows] == [0.02, 0.1]
    for row in rows:
        assert float(row["achieved_interval_s"]) == pytest.approx(float(row["interval_s"]), rel=0.5)
        assert 0 <= int(row["missed_bytes"]) < int(row["peak_bytes"])
    assert render("sampler", tmp_path / "x").count("\n| ") == 4


def write_shape(machine, arm, k, status="ok", size=None, seconds=None, passes=""):
    """A run of a real shape on a made-up GPU, its peaks `size` GiB."""
    bytes_ = size and size * GIB
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_used_bytes")
    sizes = dict.fromkeys(names, bytes_) | {"peak_resident_bytes": None, "start_bytes": 0, "device_kind": "cuda"}
    scale = "qwen3-8b-lora-p8000-c512"
    folder = write_run(
        machine, arm, k, status=status, scale=scale, passes=passes, step_seconds_median=seconds, samples=0, **sizes
    )
    sample = dict.fromkeys(SAMPLE_COLUMNS, 0) | {"timestamp": 1.0, "device_used_bytes": 1}
    pd.DataFrame([sample]).to_csv(folder / "memory.csv", index=False)
    phases = pd.DataFrame([("generate", 1, 0.0, 1.0), ("train", 1, 1.0, 1.0 + (seconds or 0) / 2)])
    phases.columns = ["phase", "step", "start", "end"]
    phases.reindex(columns=PHASE_COLUMNS).to_csv(folder / "phases.csv", index=False)


def test_the_table_of_real_shapes_compares_with_stock_and_names_what_ran_out(tmp_path):
    """Made-up figures of a GPU, to see the table; none of them leaves the temporary folder."""
    write_shape(tmp_path, "shared", 8, size=10, seconds=2.0)
    write_shape(tmp_path, "stock", 8, size=40, seconds=5.0)
    write_shape(tmp_path, "shared", 8, size=20, seconds=1.0, passes="_c8")
    write_shape(tmp_path, "shared", 32, size=11, seconds=6.0)
    write_shape(tmp_path, "stock", 32, "oom")
    write_shape(tmp_path, "stock-accumulate", 32, "running")
    lines = [line for line in render("shapes", tmp_path).splitlines() if line.startswith("| qwen3")]
    assert len(lines) == 6
    assert lines[0].startswith("| qwen3-8b-lora | 8,000 | 512 | 8 | 5.6 | `stock` | 40.00 |")
    assert "`shared` | 10.00 (4.0 x) | 10.00 (4.0 x) | 10.00 (4.0 x) | 2.00 (2.5 x) | 1.00 |" in lines[1]
    assert lines[1].endswith("| 1.00 | not marked | 1.00 |")
    assert "`shared-c8` | 20.00 (2.0 x) | 20.00 (2.0 x) | 20.00 (2.0 x) | 1.00 (5.0 x) | 1.00 |" in lines[2]
    assert "`stock` | out of memory" in lines[3] and "`stock-accumulate` | killed |" in lines[4]
    assert "`shared` | 11.00 |" in lines[5]


def test_a_copy_without_git_says_its_commit_by_the_environment(tmp_path, monkeypatch):
    """Nor does one that lies, untracked, in another repository."""
    copy = tmp_path / "rloo_memory" / "commit.py"
    copy.parent.mkdir()
    shutil.copy(commit.__file__, copy)
    monkeypatch.setattr(commit, "__file__", str(copy))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for _ in range(2):
        monkeypatch.delenv("SOURCE_COMMIT", raising=False)
        assert commit.source_commit() == "unknown"
        monkeypatch.setenv("SOURCE_COMMIT", "0123456789ab")
        assert commit.source_commit() == "0123456789ab"
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
