"""Checks that run_gpu.sh makes beside its measurements, on the CPU: errors, kernels, a profile. Nothing may fail for
the first time on a GPU."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from experiments import commit, measuring
from experiments.bench import step_profile
from experiments.bench.attention import WAYS, Layer
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import Cell
from experiments.bench.sampling import Sampled
from experiments.checks import exactness, kernels
from experiments.config import ROOT
from experiments.measuring import EXIT_VERDICT, Place
from experiments.record import read_csv
from rloo_memory.plan.records import read_run
from visualization.tables import render

pytestmark = pytest.mark.usefixtures("shared_fork")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs a check in this process, as one commit; returns its exit code."""
    monkeypatch.setattr(measuring, "source_commit", lambda: "abc")

    def run(module, *options):
        return module.main(["--device", "cpu", "--results", str(tmp_path), "--machine", "x", *options])

    return run


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
    command = [sys.executable, "-m", "experiments.checks.exactness", "--device", "cpu", "--machine", "x"]
    result = subprocess.run(
        [*command, "--results", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ
    )
    rows = read_csv(tmp_path / "x" / "exactness.csv")
    stock, *shared = ([float(row[name]) for name in ("log_prob_error", "gradient_error")] for row in rows[:3])
    ratios = [mine / theirs for errors in shared for mine, theirs in zip(errors, stock, strict=True)]
    assert max(ratios) < 1.25, "four small batches: 1.03 where this was written, other processors round otherwise"
    assert result.returncode == (4 if max(ratios) > 1.1 else 0), result.stdout + result.stderr[-3000:]
    assert [row["precision"] for row in rows] == ["bfloat16"] * 3 + ["float32"] * 3
    assert all(0 < float(row["gradient_error"]) < 1e-5 for row in rows[3:])
    assert all(row["attention"] not in ("", "none") for row in rows)
    assert result.stdout.count("events profiled in") == 6, "a way and precision once"
    assert "shared, two a pass" in render("exactness", tmp_path / "x")


@pytest.mark.parametrize(
    "float32, bfloat16, said",
    [
        ("1.000e-06", "1.050e-02", None),
        ("2.000e-05", "1.050e-02", "log_prob_error of shared in float32 is 2.000e-05, bound 1.000e-05"),
        ("1.000e-06", "1.200e-02", "log_prob_error of shared in bfloat16 is 1.200e-02, bound 1.100e-02"),
        ("nan", "1.050e-02", "log_prob_error of shared in float32 is nan, bound 1.000e-05"),
    ],
)
def test_too_large_an_error_leaves_its_rows_and_says_which_bound(
    command, monkeypatch, tmp_path, capsys, float32, bfloat16, said
):
    def compare(device, precision):
        stock, shared = ("1.000e-06", float32) if precision == "float32" else ("1.000e-02", bfloat16)
        same = {"gradient_error": "1.000e-07", "attention": "flash"}
        return [{"way": way, "log_prob_error": error, **same} for way, error in (("stock", stock), ("shared", shared))]

    monkeypatch.setattr(exactness, "use_fork", lambda arm: None)
    monkeypatch.setattr(exactness, "compare", compare)
    code = command(exactness)
    told = f"exactness: larger than it may be: {said}\n" if said else ""
    assert (code, capsys.readouterr().err) == (EXIT_VERDICT if said else 0, told)
    assert len(read_csv(tmp_path / "x" / "exactness.csv")) == 4


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

    def named(*events):
        return exactness.attention_kernels(SimpleNamespace(events=lambda: events))

    sdpa = event("aten::_scaled_dot_product_flash_attention")
    inside = event("aten::_flash_attention_forward", sdpa)
    kernel = event("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Params)", device="CUDA")
    backward = event("aten::_scaled_dot_product_flash_attention_backward")
    assert named(sdpa, inside, kernel, backward, event("aten::mm")) == "[flash_fwd_kernel] flash_attention"
    mine = event("aten::_flash_attention_forward", event("SharedPrefixAttention"))
    assert named(mine, kernel) == "[flash_fwd_kernel] _flash_attention_forward"
    cudnn = event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", device="CUDA")
    assert named(cudnn).startswith("[cudnn_generated_fort_native")
    assert named(event("aten::mm")) == "none"


@pytest.mark.torch
def test_the_kernels_are_judged_and_a_step_is_profiled(command, tmp_path, capsys):
    assert command(kernels) == 0
    rows = read_csv(tmp_path / "x" / "kernels.csv")
    assert {row["tensor"] for row in rows} == {*kernels.TENSORS, "decoding", "log-sum-exp"}
    assert all(row["verdict"] == "ok" and float(row["error"]) < 0.02 for row in rows)
    assert "| no prompt | 4 / 2 | float32 |" in render("kernels", tmp_path / "x")
    layer = Layer(Cell("4/2-heads-of-16", 40, 8, 2), WAYS, Place("cpu", tmp_path, {}))
    for way in layer.calls:
        assert all(value > 0 for value in layer.sample(way).values())
    said = capsys.readouterr().out
    assert re.search(r"shared, completions: .*flash_attention_for_cpu", said) and "shared, prompt: " in said
    assert command(step_profile) == 0
    told = r"^stock: \d{3,} events, \d+ s .*^shared-2: \d{3,} events"
    assert re.search(told, capsys.readouterr().out, re.M | re.S)
    sums = [row for row in read_csv(tmp_path / "x" / "profile.csv") if row["name"] == "all"]
    assert [row["way"] for row in sums] == ["stock", "shared-2"] and all(int(row["calls"]) > 100 for row in sums)


def test_a_kernel_whose_error_is_too_large_or_that_is_not_there_is_told(command, tmp_path, monkeypatch):
    for mine, masked, verdict in (
        (3e-3, 2e-3, "ok"),
        (5e-3, 2e-3, "too large, bound 4.0e-03"),
        (float("nan"), 2e-3, "too large, bound 4.0e-03"),
        (5e-3, None, "ok"),
        (5e-2, None, "too large, bound 2.0e-02"),
    ):
        assert kernels.Compared("output", mine, masked).judged("bfloat16")["verdict"] == verdict

    def missing(*args):
        raise NotImplementedError("_flash_attention_forward()\nis not there")

    monkeypatch.setattr(kernels, "errors_of", missing)
    assert command(kernels) == EXIT_VERDICT
    assert read_csv(tmp_path / "x" / "kernels.csv")[0]["verdict"].endswith("_flash_attention_forward() is not there")
    assert "is not there" in render("kernels", tmp_path / "x")


@pytest.mark.torch
def test_masked_attention_that_fails_is_no_failure_of_the_kernels(command, tmp_path, monkeypatch):
    import torch

    def out_of_memory(*args, plain):
        if not plain:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return whole(*args, plain)

    whole = kernels.whole
    monkeypatch.setattr(kernels, "whole", out_of_memory)
    assert command(kernels) == 0
    rows = [row for row in read_csv(tmp_path / "x" / "kernels.csv") if row["tensor"] == "output"]
    assert [row["setting"] for row in rows] == [name for name in kernels.ON_CPU for _ in range(2)]
    for row in rows:
        assert row["verdict"] == "ok" and float(row["error"]) < 0.01
        assert row["masked_verdict"].startswith("OutOfMemoryError: CUDA out of memory.") and not row["masked_error"]
    assert "OutOfMemoryError: CUDA out of memory." in render("kernels", tmp_path / "x")


def timed(model, prompt, way, seconds, metric="train_seconds"):
    cell = {"model": model, "prompt_tokens": str(prompt), "completion_tokens": "8", "k": "4"}
    return {**cell, "measurement": "cells-k8", "way": way, "metric": metric, "median": str(seconds), "failure": ""}


def test_the_profile_is_of_the_cell_where_sharing_loses_most():
    first = [("stock", 2), ("stock-cudnn", 1), ("shared-2", 0.5), ("shared-4096", 0.4)]
    rows = [timed("tiny-qwen3/sampled", 48, *way) for way in first]
    rows += [timed("tiny-qwen3/given", 64, *way) for way in (("stock", 2), ("shared-2", 3), ("shared-all", 1.8))]
    rows.append(timed("tiny-qwen3/given", 64, "shared-all", 100, "generate_seconds"))
    assert step_profile.worst(rows, "cpu") == (Cell("tiny-qwen3/given", 64, 8, 4), "stock", "shared-all")
    first = MEASUREMENTS["cells-small"].cells[0]
    assert step_profile.worst(rows[:1], "cpu") == (first, "stock", "shared-2")


@pytest.mark.slow
def test_what_the_sampler_misses_is_measured(tmp_path):
    sampled = Sampled(Cell("test", k=2), ("100 ms",), Place("cpu", tmp_path, {}))
    values = sampled.sample("100 ms")
    assert values["achieved_interval_ms"] == pytest.approx(100, rel=0.5)
    assert 0 <= values["missed_bytes"] < values["peak_bytes"]


@pytest.mark.parametrize(
    "child, said",
    [
        (dict(status="error", error="ValueError: no"), "ValueError: no"),
        (dict(status="oom"), "oom"),
        (dict(sampler=None), "sampler was lost"),
        (dict(sampler={"lost_after_s": 3.0}), "sampler was lost"),
    ],
)
def test_a_run_that_failed_or_that_nobody_sampled_is_no_sample(monkeypatch, tmp_path, child, said):
    record = {"status": "ok", "error": None, "sampler": {}, "start_bytes": 1} | child
    monkeypatch.setattr("experiments.bench.sampling.run_one", lambda config, machine: record)
    with pytest.raises(RuntimeError, match=said):
        Sampled(Cell("test", k=2), ("10 ms",), Place("cpu", tmp_path, {})).sample("10 ms")


def test_a_copy_without_git_says_its_commit_by_the_environment(tmp_path, monkeypatch):
    """Nor does one that lies, untracked, in another repository."""
    copy = tmp_path / "experiments" / "commit.py"
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


def test_what_was_measured_before_a_commit_of_pages_is_of_the_same_code(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commits(path, text):
        (tmp_path / path).write_text(text)
        git("add", ".")
        git("commit", "-qm", "one more")
        return commit.source_commit()

    (tmp_path / "experiments").mkdir()
    monkeypatch.setattr(commit, "__file__", str(shutil.copy(commit.__file__, tmp_path / "experiments")))
    git("init", "-q")
    first = commits("requirements.lock", "torch==1")
    assert first == git("rev-parse", "--short=12", "HEAD").strip()
    assert commits("README.md", "a page") == first
    (tmp_path / "rloo_memory" / "plan" / "accuracy").mkdir(parents=True)
    for path in ("rloo_memory/plan/accuracy/measured.json", "rloo_memory/README.md"):
        assert commits(path, "what came out") == first
    (tmp_path / "requirements.lock").write_text("torch==2")
    assert commit.source_commit() == f"{first}-dirty"
    assert commits("requirements.lock", "torch==2") != first
