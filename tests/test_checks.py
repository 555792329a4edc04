"""The checks of a device, on the CPU: errors against float64, kernels, the sampler. Nothing may fail for the first
time on a GPU. And which commit a figure is of."""

import os
import shutil
import subprocess
import sys

import pytest

from experiments import commit, measuring
from experiments.bench.samples import Cell
from experiments.bench.sampling import Sampled
from experiments.checks import exactness, kernels, planner_check
from experiments.config import ROOT
from experiments.measuring import EXIT_VERDICT, Place
from experiments.record import read_csv
from rloo_memory.plan.records import read_run


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs a check in this process, as one commit; returns its exit code."""
    monkeypatch.setattr(measuring, "source_commit", lambda: "abc")

    def run(module, *options):
        return module.main(["--device", "cpu", "--results", str(tmp_path), "--machine", "x", *options])

    return run


@pytest.mark.parametrize(
    "module, options, said",
    [
        (exactness, ["--device", "gpu"], "unknown device 'gpu'"),
        (planner_check, ["--cases", "nope"], "unknown case 'nope'"),
    ],
)
def test_bad_input_is_one_line(command, capsys, module, options, said):
    assert command(module, *options) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err


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
    assert all("flash_attention" in row["attention"] for row in rows)


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
def test_the_kernels_are_right_also_where_masked_attention_fails(command, tmp_path, monkeypatch, shared_fork):
    import torch

    assert command(kernels) == 0
    rows = read_csv(tmp_path / "x" / "kernels.csv")
    assert {row["tensor"] for row in rows} == {*kernels.TENSORS, "decoding", "log-sum-exp"}
    assert all(row["verdict"] == "ok" and float(row["error"]) < 0.02 for row in rows)

    def out_of_memory(*args, plain):
        if not plain:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return whole(*args, plain)

    whole = kernels.whole
    monkeypatch.setattr(kernels, "whole", out_of_memory)
    assert command(kernels) == 0
    assert "OutOfMemoryError" in read_csv(tmp_path / "x" / "kernels.csv")[0]["masked_verdict"]


def test_a_kernel_whose_error_is_too_large_or_that_is_not_there_is_told(command, tmp_path, monkeypatch):
    for mine, masked, verdict in (
        (3e-3, 2e-3, "ok"),
        (5e-3, 2e-3, "too large, bound 4.0e-03"),
        (float("nan"), 2e-3, "too large, bound 4.0e-03"),
        (5e-3, None, "ok"),
        (5e-2, None, "too large, bound 2.0e-02"),
    ):
        assert kernels.judged("output", mine, masked, "bfloat16")["verdict"] == verdict

    def missing(*args):
        raise NotImplementedError("_flash_attention_forward()\nis not there")

    monkeypatch.setattr(kernels, "errors_of", missing)
    monkeypatch.setattr(kernels, "use_fork", lambda arm: None)
    assert command(kernels) == EXIT_VERDICT
    assert read_csv(tmp_path / "x" / "kernels.csv")[0]["verdict"].endswith("_flash_attention_forward() is not there")


def test_the_planner_check_goes_on_where_it_was_killed(command, monkeypatch, tmp_path):
    def check(name, device):
        if name == "stock-k8" and not checked.count("stock-k8"):
            checked.append(name)
            raise KeyboardInterrupt
        checked.append(name)
        sizes = {"predicted_bytes": 11, "measured_bytes": 10, "error": 0.1}
        return [{"phase": phase, **sizes} for phase in planner_check.PHASES]

    checked = []
    monkeypatch.setattr(planner_check, "use_fork", lambda arm: None)
    monkeypatch.setattr(planner_check, "check", check)
    cases = ("--cases", "stock-k4,stock-k8")
    assert command(planner_check, *cases) == 130
    assert command(planner_check, *cases) == 0 and checked == ["stock-k4", "stock-k8", "stock-k8"]
    assert len(read_csv(tmp_path / "x" / "plan_check.csv")) == 8


@pytest.mark.slow
def test_what_the_sampler_misses_is_measured(tmp_path):
    sampled = Sampled(Cell("test", k=2), ("100 ms",), Place("cpu", tmp_path, {}))
    values = sampled.sample("100 ms")
    assert values["achieved_interval_ms"] == pytest.approx(100, rel=0.5)
    assert 0 <= values["missed_bytes"] < values["peak_bytes"]


def test_what_was_measured_before_a_commit_of_pages_is_of_the_same_code(tmp_path, monkeypatch):
    """And a copy without git says its commit by the environment."""

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
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("SOURCE_COMMIT", "0123456789ab")
    assert commit.source_commit() == "0123456789ab"
    git("init", "-q")
    first = commits("requirements.lock", "torch==1")
    assert first == git("rev-parse", "--short=12", "HEAD").strip()
    assert commits("README.md", "a page") == first
    (tmp_path / "requirements.lock").write_text("torch==2")
    assert commit.source_commit() == f"{first}-dirty"
    assert commits("requirements.lock", "torch==2") != first
