"""The suite: order, what a failure does, and what may be skipped."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from experiments import suite
from experiments.config import ROOT, ConfigError
from experiments.record import RunRecord, read_record


def run_suite(tmp_path, *options):
    command = [
        sys.executable,
        "-m",
        "experiments.suite",
        "--scale",
        "test",
        "--device",
        "cpu",
        "--results",
        str(tmp_path),
        "--machine",
        "here",
        "--threads",
        "1",
        *options,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def write_record(machine, config, **fields):
    """A finished run of `config`, with `fields` instead of the usual ones; returns its folder."""
    folder = machine / config.run_id
    folder.mkdir(parents=True)
    identity = (config.run_id, config.arm, config.scale, config.k, config.repeat, config.as_dict())
    usual = dict(commit="abc", status="ok", start_bytes=2**30, peak_resident_bytes=2**30 * 3, device_kind="cpu")
    RunRecord(*identity, **{**usual, **fields}).write(folder)
    return folder


def test_the_suite_goes_on_after_a_failure_and_says_so(tmp_path):
    """A budget between what the untouched trainer needs and what the lean one needs."""
    arms = ("classic-baseline", "classic-lean")
    result = run_suite(
        tmp_path, "--arms", ",".join(arms), "--k", "2", "--scale", "short", "--steps", "1", "--budget", "250MiB"
    )
    baseline, lean = (read_record(tmp_path / "here" / f"{arm}_short_k2_r0") for arm in arms)
    assert (baseline["status"], lean["status"]) == ("oom", "ok"), result.stdout + result.stderr
    assert result.returncode == 0, "out of memory is an outcome, not a failure of the suite"
    assert "[1/2] classic-baseline k=2 repeat 0" in result.stdout and "OUT OF MEMORY" in result.stdout
    assert "[2/2] classic-lean k=2 repeat 0" in result.stdout
    assert result.stdout.splitlines()[-2].split() == ["classic-baseline", "OOM"]
    assert len((tmp_path / "here" / "summary.csv").read_text().splitlines()) == 3


def test_no_run_is_begun_after_the_minutes(tmp_path):
    result = run_suite(tmp_path, "--arms", "stock,shared", "--k", "2", "--minutes", "0")
    assert result.returncode == 0 and "not begun after --minutes 0" in result.stdout, result.stdout + result.stderr
    assert not list(tmp_path.rglob("run.json"))


def test_a_run_that_native_code_aborted_is_told_by_its_last_words(tmp_path):
    config = suite.cfg.resolve("stock", 2, "test", "cpu")
    folder = tmp_path / config.run_id
    folder.mkdir()
    for words, status in (("memory allocation of 4096 bytes failed", "oom"), ("assertion failed", "error")):
        identity = (config.run_id, config.arm, config.scale, config.k, config.repeat, config.as_dict())
        RunRecord(*identity, "abc", launch="mine").write(folder)
        (folder / "log.txt").write_text(words)
        record = suite.settle_record(config, tmp_path, "mine", -signal.SIGABRT, [])
        assert record["status"] == status and "SIGABRT" in record["error"]
        assert read_record(folder) == record


def test_arms_alternate_within_k_and_repeats_come_last():
    args = SimpleNamespace(**dict.fromkeys(suite.OPTIONS), timeout=60, minutes=None)
    args.device, args.scale, args.k, args.repeats, args.arms = "cpu", "test", "2,4", 2, "stock,classic-lean"
    args.machine, args.results = "here", ROOT / "results"
    plan, machine = suite.make_plan(args)
    assert [(c.arm, c.k, c.repeat) for c in plan] == [
        (arm, k, repeat) for repeat in (0, 1) for k in (2, 4) for arm in ("stock", "classic-lean")
    ]
    assert machine == ROOT / "results" / "here"
    assert {c.seed for c in plan if c.repeat == 1} == {43}


@pytest.mark.parametrize(
    "options, remedy",
    [
        (["--arms", "stokc", "--k", "2"], "stock"),
        (["--arms", "stock", "--k", "two"], "2,4,8"),
        (["--arms", "stock", "--k", "1"], "--k 2"),
        (["--arms", "stock", "--repeats", "0"], "at least 1"),
    ],
)
def test_a_bad_plan_is_refused_before_its_first_run(options, remedy, tmp_path, capsys):
    assert suite.main([*options, "--device", "cpu", "--results", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and remedy in errors[0]
    assert not list(tmp_path.iterdir())


def test_only_the_same_configuration_on_the_same_commit_is_skipped():
    config = suite.cfg.resolve("stock", 2, "test", "cpu")
    record = {"status": "ok", "config": json.loads(json.dumps(config.as_dict())), "commit": "abc"}
    assert suite.is_same(record, config, "abc")
    assert suite.is_same({**record, "status": "oom"}, config, "abc")
    assert not suite.is_same({**record, "status": "error"}, config, "abc")
    assert not suite.is_same(record, config, "abd")
    assert not suite.is_same({**record, "commit": "abc-dirty"}, config, "abc-dirty")
    assert not suite.is_same(record, suite.cfg.resolve("stock", 2, "test", "cpu", steps=3), "abc")


def test_a_finished_run_is_skipped_and_an_unfinished_one_repeated(tmp_path, monkeypatch):
    started = []

    def run_one(config, machine, timeout, token, show):
        started.append(config.run_id)
        raise ConfigError("not in this test")

    monkeypatch.setattr(suite, "source_commit", lambda: "abc")
    monkeypatch.setattr(suite, "run_one", run_one)
    plan = [suite.cfg.resolve(arm, 2, "test", "cpu") for arm in ("stock", "classic-lean")]
    for config, status in zip(plan, ("oom", "error"), strict=True):
        write_record(tmp_path, config, status=status, commit="abc")
    suite.run_plan(plan, tmp_path, False, 60, None)
    assert started == ["classic-lean_test_k2_r0"]
    suite.run_plan(plan, tmp_path, True, 60, None)
    assert len(started) == 3
