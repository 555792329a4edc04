"""The suite: order, what a failure does, and what may be skipped."""

import json
import signal
import subprocess
import sys

import pytest

from experiments import suite
from experiments.config import ROOT
from experiments.record import read_record


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
    for words, status in (("memory allocation of 4096 bytes failed", "oom"), ("assertion failed", "error")):
        (tmp_path / "run.json").write_text(json.dumps({"status": "running"}))
        (tmp_path / "log.txt").write_text(words)
        record = suite.settle_record(tmp_path, -signal.SIGABRT)
        assert record["status"] == status and "SIGABRT" in record["error"]


def test_arms_alternate_within_k_and_repeats_come_last():
    args = type("Args", (), dict.fromkeys(suite.PASSED_ON))()
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
    monkeypatch.setattr(suite, "source_commit", lambda: "abc")
    monkeypatch.setattr(suite, "run_one", lambda config, *_: started.append(config.run_id) or 0)
    plan = [suite.cfg.resolve(arm, 2, "test", "cpu") for arm in ("stock", "classic-lean")]
    for config, status in zip(plan, ("oom", "error"), strict=True):
        folder = tmp_path / config.run_id
        folder.mkdir()
        fields = dict.fromkeys(suite.write_summary.__globals__["SUMMARY_COLUMNS"])
        record = {**fields, "config": config.as_dict(), "commit": "abc", "status": status, "error": "", "trace": []}
        record.update(run_id=config.run_id, scale="test", arm=config.arm, k=2, repeat=0)
        (folder / "run.json").write_text(json.dumps(record))
    args = type("Args", (), {"fresh": False, "minutes": None})()
    suite.run_plan(plan, tmp_path, args)
    assert started == ["classic-lean_test_k2_r0"]
    args.fresh = True
    suite.run_plan(plan, tmp_path, args)
    assert len(started) == 3
