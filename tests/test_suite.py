"""The suite: order, what a failure does, and what may be skipped."""

import json
import math
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from experiments import record as experiments_record
from experiments import suite
from experiments.config import ROOT
from experiments.run_record import read_record
from rloo_memory.errors import EXIT_TIME, ConfigError
from tests.waiting import until


def run_suite(tmp_path, *options):
    usual = "--scale test --device cpu --machine here --threads 1".split()
    command = [sys.executable, "-m", "experiments.suite", *usual, "--results", str(tmp_path), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def write_record(machine, config, **fields):
    """A finished run of `config`, with `fields` instead of the usual ones; returns its folder."""
    folder = machine / config.run_id
    folder.mkdir(parents=True)
    usual = dict(commit="abc", status="ok", start_bytes=2**30, peak_resident_bytes=2**30 * 3, device_kind="cpu")
    experiments_record.write_record(experiments_record.new_record(config, **{**usual, **fields}), folder)
    return folder


@pytest.mark.slow
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
    assert len((tmp_path / "here" / "runs.jsonl").read_text().splitlines()) == 2


def test_a_run_that_native_code_aborted_is_told_by_its_last_words(tmp_path):
    config = suite.cfg.resolve("stock", 2, "test", "cpu")
    folder = tmp_path / config.run_id
    folder.mkdir()
    for words, status in (("memory allocation of 4096 bytes failed", "oom"), ("assertion failed", "error")):
        experiments_record.write_record(experiments_record.new_record(config, "abc", launch="mine"), folder)
        (folder / "log.txt").write_text(words)
        record = suite.settle_record(config, tmp_path, "mine", -signal.SIGABRT, [])
        assert record["status"] == status and "SIGABRT" in record["error"]
        assert read_record(folder) == record


def test_arms_alternate_within_k_and_repeats_come_last():
    args = SimpleNamespace(**dict.fromkeys(suite.OPTIONS), timeout=60, minutes=math.inf)
    args.device, args.scale, args.k, args.repeats, args.arms = "cpu", "test", "2,4", 2, "stock,classic-lean"
    args.machine, args.results = "here", None
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
        # One run of the plan cannot follow: another arm, more than k = 2
        (["--arms", "shared,stock", "--k", "4", "--completions-per-forward", "4"], "--completions-per-forward 4"),
        (["--arms", "shared", "--k", "2,4", "--completions-per-forward", "4"], "--completions-per-forward 4"),
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
    suite.run_plan(plan, tmp_path, False, 60, math.inf)
    assert started == ["classic-lean_test_k2_r0"]
    suite.run_plan(plan, tmp_path, True, 60, math.inf)
    assert len(started) == 3


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets a few lines of Python stand for the process of a run. They know `launch`, its `config` and `folder`, and
    `record(**fields)` writes run.json. The code counts as changed, so that no older run counts."""

    def stand_in(code):
        stub = tmp_path / "python"
        stub.write_text(
            f"#!{sys.executable}\n"
            "import json, os, signal, sys, time\n"
            "from pathlib import Path\n"
            "from experiments.processes import Launch\n"
            "launch = Launch.read(Path(sys.argv[-1]))\n"
            "config, folder = launch.config, launch.machine / launch.config.run_id\n"
            "def record(**fields):\n"
            "    folder.mkdir(exist_ok=True)\n"
            "    path = folder / 'run.json'\n"
            "    identity = {n: getattr(config, n) for n in ('run_id', 'arm', 'scale', 'k', 'repeat')}\n"
            "    usual = dict(config=config.as_dict(), status='ok', commit='x', trace=[], launch=launch.token,\n"
            "                 start_bytes=2**30, peak_resident_bytes=2**30 * 2, peak_device_used_bytes=None)\n"
            "    path.write_text(json.dumps({**identity, **usual, **fields}))\n"
            "if config.arm != 'classic-lean':\n"
            "    record()\n"
            "    sys.exit(0)\n" + code
        )
        stub.chmod(0o755)
        monkeypatch.setattr(suite.sys, "executable", str(stub))

    monkeypatch.setattr(suite, "source_commit", lambda: "abc-dirty")
    return stand_in


# What the process of a run does -> what the suite says, what the table says, what the folder holds afterwards
CHILDREN = {
    "refused": ("print('train: --x 1 is bad; use 2', file=sys.stderr); sys.exit(2)", "REFUSED: --x 1 is bad; use 2",
                "refused", "the older run"),
    "killed before its first record": ("os.kill(os.getpid(), 9)", "FAILED: ended by SIGKILL before it began",
                                       "error", "ended by SIGKILL before it began"),
    "broken before its first record": ("raise ImportError('no such thing')", "FAILED: ImportError: no such thing",
                                       "error", "ImportError: no such thing"),
    "ended well, nothing written": ("", "FAILED: ended by exit code 0 before it began", "error",
                                    "ended by exit code 0 before it began"),
    "killed later": ("record(status='running'); os.kill(os.getpid(), 9)", "ended by SIGKILL before it could report",
                     "error", "ended by SIGKILL before it could report"),
    "the record of another launch": ("record(launch='another')", "FAILED: ended by exit code 0", "error",
                                     "ended by exit code 0 before it began"),
    "too slow": ("record(status='running'); time.sleep(60)", "FAILED: stopped after --timeout 2 s", "error",
                 "stopped after --timeout 2 s"),
    "deaf": ("signal.signal(15, signal.SIG_IGN); record(status='running'); time.sleep(60)",
             "FAILED: stopped after --timeout 2 s", "error", "stopped after --timeout 2 s"),
    "failed by its own word": ("record(status='error', error='ValueError: no'); sys.exit(1)", "FAILED: ValueError: no",
                               "error", "ValueError: no"),
    "out of memory": ("record(status='oom'); sys.exit(3)", "OUT OF MEMORY", "OOM", None),
    "its folder is gone": ("record(); (folder / 'run.json').unlink(); folder.rmdir(); sys.exit(1)",
                           "FAILED: ended by exit code 1", "error", "ended by exit code 1 before it began"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHILDREN)
def test_an_older_run_never_passes_for_this_one(case, child, tmp_path, capfd, monkeypatch):
    """An older finished run lies in the folder. Whatever happens to the new one, its peak of 2.00 is not shown, the
    other arm is run, and the exit code tells."""
    code, said, shown, left = CHILDREN[case]
    child(code)
    monkeypatch.setattr(suite, "PATIENCE", 0.5)
    config = suite.cfg.resolve("classic-lean", 2, "test", "cpu", threads=1)
    folder = write_record(tmp_path / "here", config, error="the older run")
    options = ["--arms", "classic-lean,stock", "--k", "2", "--scale", "test", "--device", "cpu", "--threads", "1"]
    code = suite.main([*options, "--timeout", "2", "--results", str(tmp_path), "--machine", "here"])
    output = capfd.readouterr()
    assert code == (0 if shown == "OOM" else 1), output
    assert said in output.out and not output.err, output
    lines = [line.split() for line in output.out.splitlines()]
    assert ["classic-lean", shown] in lines and ["stock", "1.00"] in lines, output.out
    assert read_record(folder).get("error") == left
    assert (tmp_path / "here" / "runs.jsonl").read_text().count("\n") == 2


def test_another_configuration_left_there_is_not_shown_for_a_run_that_is_not_begun(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(suite, "source_commit", lambda: "abc")
    usual, other = (suite.cfg.resolve("shared", 2, "test", "cpu", threads=1, steps=n) for n in (2, 777))
    folder = write_record(tmp_path / "here", usual)
    before = read_record(folder)
    options = ["--arms", "shared", "--k", "2", "--scale", "test", "--device", "cpu", "--threads", "1"]
    options += ["--results", str(tmp_path), "--machine", "here", "--minutes", "0"]
    late, there = (EXIT_TIME, "not begun"), (0, "2.00")
    for more, (code, shown) in ((["--steps", "777"], late), ([], there), (["--fresh"], late)):
        assert suite.main([*options, *more]) == code
        said = capfd.readouterr().out
        assert said.splitlines()[-1].split(maxsplit=1) == ["shared", shown] and read_record(folder) == before
        assert ("not begun after --minutes 0" in said) == (code == EXIT_TIME)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_stopped_suite_shows_what_there_is(number, child, tmp_path, capfd):
    """The signal goes to the suite alone: it hands it on once, and waits for the run's record."""
    child(
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    record(status='error', error='told')\n"
        "    sys.exit(1)\n"
        f"signal.signal({int(number)}, stop)\n"
        "record(status='running')\n"
        f"os.kill(launch.parent, {int(number)})\n"
        "time.sleep(60)\n"
    )
    options = ["--arms", "stock,classic-lean,shared", "--k", "2", "--scale", "test", "--device", "cpu"]
    assert suite.main([*options, "--results", str(tmp_path), "--machine", "here"]) == 128 + number
    output = capfd.readouterr()
    assert not output.err
    assert [line.split(maxsplit=1)[:2] for line in output.out.splitlines()[-4:-1]] == [
        ["stock", "1.00"], ["classic-lean", "stopped"], ["shared", "not begun"],
    ]  # fmt: skip
    assert output.out.splitlines()[-1].startswith(f"stopped by {number.name}")
    assert read_record(tmp_path / "here" / "classic-lean_test_k2_r0")["error"] == "told"


@pytest.mark.parametrize("options", ((), ("--results", "{tmp}/my results", "--machine", "box", "--device", "cpu")))
def test_where_runs_would_go_is_printed_and_nothing_is_made(options, tmp_path, capsys):
    """The scripts ask for it, to draw that folder (test_scripts)."""
    options = [option.format(tmp=tmp_path) for option in options]
    assert suite.main(["--arms", "stock", "--k", "4", *options, "--print-folder"]) == 0
    own = ROOT / "results" / suite.machine_name(*suite.pick_device("auto")[:2])
    assert capsys.readouterr().out == f"{tmp_path / 'my results' / 'box' if options else own}\n"
    assert not list(tmp_path.iterdir())


def test_a_suite_ends_with_the_script_that_began_it(tmp_path):
    """A script that is killed hands no signal on: the kernel does, whatever killed it."""
    script = tmp_path / "run_improve-rloo.sh"
    script.write_text((ROOT / script.name).read_text())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    stand_in = "import time; from experiments import suite; suite.run = lambda argv: time.sleep(60); suite.main()"
    for path, text in {
        "setup_env.sh": "",
        ".venv/bin/python": f"echo $$ >{tmp_path}/pid; PYTHONPATH={ROOT} exec {sys.executable} -c '{stand_in}'\n",
    }.items():
        (tmp_path / path).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / path).chmod(0o755)
    process = subprocess.Popen(["bash", script], stderr=subprocess.DEVNULL)
    child = psutil.Process(int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())))
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_suite_tells_how_far_a_run_is(child, tmp_path, capfd, monkeypatch):
    child("print('  step 1 of 2, generate', flush=True); time.sleep(1.5); record()")
    shown = []
    config = suite.cfg.resolve("classic-lean", 2, "test", "cpu")
    assert suite.run_one(config, tmp_path, show=shown.append)["status"] == "ok"
    assert any(text.startswith("step 1 of 2, generate, 0:0") for text in shown)


def test_earlier_runs_of_the_same_cell_tell_the_time(tmp_path):
    plan = [suite.cfg.resolve(arm, 2, "test", "cpu", repeat=1) for arm in ("stock", "shared")]
    times = dict(started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:01:30+00:00")
    write_record(tmp_path, suite.cfg.resolve("stock", 2, "test", "cpu"), **times)
    write_record(tmp_path, suite.cfg.resolve("stock", 4, "test", "cpu"), **times)
    broken = write_record(tmp_path, suite.cfg.resolve("shared", 2, "test", "cpu"), started_at="yesterday")
    seconds = suite.earlier_seconds(plan, tmp_path)
    assert list(seconds.values()) == [[90.0]] and broken.exists()
    assert suite.expected(plan, seconds) == "3:00"
