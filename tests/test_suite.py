"""The suite: order, what a failure does, and what may be skipped."""

import math
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from experiments import record as experiments_record
from experiments import suite
from experiments.config import ROOT
from experiments.run_record import read_record
from rloo_memory.errors import EXIT_TIME

OPTIONS = "--scale test --device cpu --machine here --threads 1".split()
CONFIG = suite.cfg.resolve("classic-lean", 2, "test", "cpu", threads=1)


def run_suite(tmp_path, *options):
    command = [sys.executable, "-m", "experiments.suite", *OPTIONS, "--results", str(tmp_path), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def write_record(machine, config, **fields):
    """A finished run of `config`, with `fields` instead of the usual ones; returns its folder."""
    folder = machine / config.run_id
    folder.mkdir(parents=True, exist_ok=True)
    usual = dict(commit="abc", status="ok", start_bytes=2**30, peak_resident_bytes=2**30 * 3, device_kind="cpu")
    experiments_record.write_record(experiments_record.new_record(config, **{**usual, **fields}), folder)
    return folder


@pytest.mark.slow
def test_the_suite_goes_on_after_a_run_that_is_out_of_memory(tmp_path):
    """A budget between what the untouched trainer needs and what the lean one needs."""
    arms = ("classic-baseline", "classic-lean")
    words = ("--arms", ",".join(arms), "--k", "2", "--scale", "short", "--steps", "1", "--budget", "250MiB")
    result = run_suite(tmp_path, *words)
    baseline, lean = (read_record(tmp_path / "here" / f"{arm}_short_k2_r0") for arm in arms)
    assert (baseline["status"], lean["status"]) == ("oom", "ok"), result.stdout + result.stderr
    assert result.returncode == 0, "out of memory is an outcome, not a failure of the suite"
    assert "[1/2] classic-baseline k=2 repeat 0" in result.stdout and "OUT OF MEMORY" in result.stdout
    assert result.stdout.splitlines()[-2].split() == ["classic-baseline", "OOM"]
    assert len((tmp_path / "here" / "runs.jsonl").read_text().splitlines()) == 2


def test_arms_alternate_within_k_and_repeats_come_last():
    args = SimpleNamespace(**dict.fromkeys(suite.settings()), device="cpu", machine="here", results=None)
    args.scale, args.arms, args.k, args.repeats = "test", "stock,classic-lean", "2,4", 2
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
        (["--arms", "stock", "--repeats", "0"], "at least 1"),
        (["--arms", "stock", "--model", "/no/such"], "'/no/such' does not exist"),
        (["--arms", "shared,stock", "--k", "4", "--completions-per-forward", "4"], "stock"),
    ],
)
def test_a_bad_plan_is_refused_before_its_first_run(options, remedy, tmp_path, capsys):
    if "shared,stock" in options:
        options = [*options, "--batch", "8"]  # one run of the plan cannot follow
    assert suite.main([*options, "--device", "cpu", "--results", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and remedy in errors[0]
    assert not list(tmp_path.iterdir())


def test_only_what_finished_with_this_configuration_on_this_commit_is_skipped(tmp_path, monkeypatch):
    started = []

    def run_one(config, machine, timeout):
        started.append(config.arm)
        return {"status": "error"}

    monkeypatch.setattr(suite, "run_one", run_one)
    monkeypatch.setattr(suite, "source_commit", lambda: commit)

    def begun(commit_now="abc", fresh=False, was=CONFIG, **fields):
        nonlocal commit
        commit = commit_now
        started.clear()
        write_record(tmp_path, was, **{"commit": "abc", **fields})
        suite.run_plan([CONFIG], tmp_path, fresh, 60, math.inf)
        return bool(started)

    commit = ""
    assert not begun() and not begun(status="oom")
    assert begun(fresh=True) and begun(status="error") and begun("abd") and begun("abc-dirty", commit="abc-dirty")
    assert begun(was=replace(CONFIG, steps=3))


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets a few lines of Python stand for the process of a run. They know its `folder`, and `record(**fields)` writes
    run.json. The code counts as changed, so that no older run counts."""

    def stand_in(code):
        stub = tmp_path / "python"
        stub.write_text(
            f"#!{sys.executable}\n"
            "import json, os, signal, sys, time\n"
            "from pathlib import Path\n"
            "given = dict(word[2:].split('=', 1) for word in sys.argv[3:])\n"
            "folder = Path(given['results'], given['machine'], given['arm'] + '_test_k2_r0')\n"
            "def record(**fields):\n"
            "    folder.mkdir(parents=True, exist_ok=True)\n"
            "    known = dict(run_id=folder.name, arm=given['arm'], scale='test', k=2, repeat=0, config={},\n"
            "                 commit='x', status='ok', start_bytes=2**30, peak_resident_bytes=2**30 * 2)\n"
            "    (folder / 'run.json').write_text(json.dumps({**known, 'pid': os.getpid(), **fields}))\n"
            "if given['arm'] != 'classic-lean':\n"
            "    record()\n"
            "    sys.exit(0)\n" + code
        )
        stub.chmod(0o755)
        monkeypatch.setattr(suite.sys, "executable", str(stub))

    monkeypatch.setattr(suite, "source_commit", lambda: "abc-dirty")
    return stand_in


# What the process of a run does -> what the suite says, what the table says, what the folder holds afterwards
OLDER = "the older run"
CHILDREN = {
    "refused": ("sys.exit(2)", "FAILED: refused", "error", OLDER),
    "killed before its first record": ("os.kill(os.getpid(), 9)", "ended by SIGKILL before it began", "error", OLDER),
    "killed later": ("record(status='running'); os.kill(os.getpid(), 9)", "ended by SIGKILL before it could report",
                     "error", "ended by SIGKILL before it could report"),
    "out of memory in native code": (
        "record(status='running'); (folder / 'log.txt').write_text('memory allocation of 4096 bytes failed')\n"
        "os.kill(os.getpid(), signal.SIGABRT)",
        "OUT OF MEMORY: ended by SIGABRT", "OOM", "ended by SIGABRT before it could report"),
    "deaf and too slow": ("signal.signal(15, signal.SIG_IGN); record(status='running'); time.sleep(60)",
                          "FAILED: stopped after --timeout 2 s", "error", "stopped after --timeout 2 s"),
    "failed by its own word": ("record(status='error', error='ValueError: no'); sys.exit(1)", "some runs failed",
                               "error", "ValueError: no"),
    "out of memory": ("record(status='oom'); sys.exit(3)", "", "OOM", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHILDREN)
def test_an_older_run_never_passes_for_this_one(case, child, tmp_path, capfd, monkeypatch):
    """An older finished run lies in the folder. Whatever happens to the new one, its peak of 2.00 is not shown, the
    other arm is run, and the exit code tells."""
    code, said, shown, left = CHILDREN[case]
    child(code)
    monkeypatch.setattr(suite, "PATIENCE", 0.5)
    folder = write_record(tmp_path / "here", CONFIG, error=OLDER)
    options = ["--arms", "classic-lean,stock", "--k", "2", "--timeout", "2", "--results", str(tmp_path)]
    code = suite.main([*options, *OPTIONS])
    output = capfd.readouterr()
    assert code == (0 if shown == "OOM" else 1), output
    assert said in output.out and not output.err, output
    lines = [line.split() for line in output.out.splitlines()]
    assert ["classic-lean", shown] in lines and ["stock", "1.00"] in lines, output.out
    assert read_record(folder)["error"] == left
    assert (tmp_path / "here" / "runs.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_stopped_suite_shows_what_there_is(number, child, tmp_path, capfd):
    """The signal goes to the suite alone, which tells the run, and waits for its record."""
    child(
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    record(status='error', error='told')\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "record(status='running')\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(60)\n"
    )
    options = ["--arms", "stock,classic-lean,shared", "--k", "2", "--results", str(tmp_path)]
    assert suite.main([*options, *OPTIONS]) == 128 + number
    output = capfd.readouterr()
    assert not output.err
    assert [line.split(maxsplit=1)[:2] for line in output.out.splitlines()[-4:-1]] == [
        ["stock", "1.00"], ["classic-lean", "stopped"], ["shared", "not begun"],
    ]  # fmt: skip
    assert output.out.splitlines()[-1].startswith(f"stopped by {number.name}")
    assert read_record(tmp_path / "here" / CONFIG.run_id)["error"] == "told"


def test_what_does_not_fit_into_the_minutes_is_left_for_later(tmp_path, capfd):
    options = ["--arms", "shared", "--k", "2", "--minutes", "0", "--results", str(tmp_path)]
    assert suite.main([*options, *OPTIONS]) == EXIT_TIME
    assert capfd.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["shared", "not begun"]


@pytest.mark.parametrize("options", ((), ("--results", "{tmp}/my results", "--machine", "box", "--device", "cpu")))
def test_where_runs_would_go_is_printed_and_nothing_is_made(options, tmp_path, capsys):
    """The scripts ask for it, to draw that folder (test_scripts)."""
    options = [option.format(tmp=tmp_path) for option in options]
    assert suite.main(["--arms", "stock", "--k", "4", *options, "--print-folder"]) == 0
    own = ROOT / "results" / suite.machine_name(*suite.pick_device("auto")[:2])
    assert capsys.readouterr().out == f"{tmp_path / 'my results' / 'box' if options else own}\n"
    assert not list(tmp_path.iterdir())


def test_a_suite_ends_with_the_script_that_began_it():
    """A script that is killed hands no signal on: the kernel does, whatever killed it."""
    wait = "lambda args: print(os.getpid(), flush=True) or time.sleep(60)"
    code = f"import os, time; from experiments import suite; suite.make_plan = {wait}; suite.main()"
    words = [sys.executable, "-c", code, "--arms", "stock"]
    script = "import os, subprocess, sys; os.environ['SCRIPT_PID'] = str(os.getpid()); subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", script, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
