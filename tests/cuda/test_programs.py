"""Programs of the project from their first to their last line on the device: the example, the launcher, a run of an
arm, one that is out of memory, and the first commands of the program for a GPU."""

import json
import subprocess
import sys

import device
import pytest
from conftest import INTERPRETED

from experiments.record import read_csv

TRAIN = ("-m", "experiments.train", "--k", 2, "--scale", "test", "--device", "cuda", "--machine", "here")


def test_the_readme_example_trains_on_the_device(on_device):
    result = on_device("examples/train_with_prefix_sharing.py", "--k", 4, "--steps", 1, **INTERPRETED)
    assert result.code == 0, result.err[-3000:]
    assert "MiB on the GPU" in result.out and not result.reports[-1]["unsupported"]


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_the_launcher_trains_on_the_device(on_device, tmp_path, deterministic):
    """Also where PyTorch may take deterministic kernels only."""
    words = ("balanced", "--max_steps", 1, "--max_completion_length", 8, "--num_generations", 4)
    words += ("--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2)
    words += ("--full_determinism", deterministic)
    result = on_device("-m", "rloo_memory.launch", *words, cwd=tmp_path, MODEL_PATH="random:tiny-qwen3", **INTERPRETED)
    assert result.code == 0, result.err[-3000:]
    assert "predicted peak" in result.out and "GiB that are free" not in result.err
    assert not any(report["unsupported"] for report in result.reports)


@pytest.mark.parametrize("arm", ["stock", "shared"])
def test_a_run_is_measured_on_the_device(on_device, tmp_path, arm):
    result = on_device(*TRAIN, "--arm", arm, "--results", tmp_path, **INTERPRETED)
    assert result.code == 0, result.err[-3000:]
    record = json.loads((tmp_path / "here" / f"{arm}_test_k2_r0" / "run.json").read_text())
    assert record["status"] == "ok" and record["device_kind"] == "cuda" and record["device_name"] == "Emulated sm_90"
    assert 0 < record["peak_allocated_bytes"] < record["peak_reserved_bytes"]


def test_a_run_that_is_out_of_memory_is_recorded_as_that(on_device, tmp_path):
    budget = ("--budget", "20MiB")  # less than cuBLAS's workspace
    result = on_device(*TRAIN, *budget, "--arm", "shared", "--results", tmp_path, gib=2, **INTERPRETED)
    assert result.code == 3, result.err[-3000:]
    record = json.loads((tmp_path / "here" / "shared_test_k2_r0" / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("oom", 3) and "out of memory" in record["error"]


def test_cells_of_the_bench_are_measured_on_the_device(on_device, tmp_path):
    """Seconds mean nothing here; bytes are those that torch allocates."""
    place = ("--device", "cuda", "--machine", "here", "--results", tmp_path)
    small = ("--models", "tiny-qwen3/ragged", "--cells", "32x4x2", "--ways", "stock,shared-2")
    result = on_device("-m", "experiments.bench", "cells-small", *place, *small, **INTERPRETED)
    assert result.code == 0, result.out[-2000:] + result.err[-3000:]
    rows = {(row["way"], row["metric"]): row["median"] for row in read_csv(tmp_path / "here" / "bench.csv")}
    for way in ("stock", "shared-2"):
        sizes = [float(rows[way, f"train_{size}_bytes"]) for size in ("allocated", "reserved", "device")]
        assert 0 < sizes[0] < sizes[1] < sizes[2], (way, sizes)
    assert not any(report["unsupported"] for report in result.reports)


def test_the_program_for_a_gpu_begins_in_a_bare_copy(tmp_path):
    """`run_gpu.sh` where there are the project's files alone, with no time for an item: it says what the device is."""
    copy = tmp_path / "copy"
    copy.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=device.ROOT, capture_output=True, check=True).stdout
    archive = ["tar", "-c", "--null", "-T", "-"]
    packed = subprocess.run(archive, cwd=device.ROOT, input=files, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=packed, check=True)
    settings = {"PYTHON": sys.executable, "MINUTES": 1, "OUT": tmp_path / "gpu.tar.gz", **INTERPRETED}
    environment = device.environment(**settings)
    command = ["./run_gpu.sh", "exactness", "--results", tmp_path / "results"]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "exactness: not begun" in result.stdout
    (machine,) = (tmp_path / "results").iterdir()
    assert (tmp_path / "gpu.tar.gz").exists() and "PyTorch version" in (machine / "on_gpu" / "device.txt").read_text()
