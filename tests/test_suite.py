"""The suite: order, what a failure does, and what may be skipped."""

import math
import sys
from dataclasses import replace

import pytest

from experiments import record as experiments_record
from experiments import suite
from experiments.config import ROOT
from experiments.run_record import read_record
from rloo_memory.device import machine_name
from rloo_memory.errors import EXIT_TIME

OPTIONS = "--scale test --device cpu --machine here --threads 1".split()
CONFIG = suite.cfg.resolve("classic-lean", 2, "test", "cpu", threads=1)


def write_record(machine, config, **fields):
    """A finished run of `config`, with `fields` instead of the usual ones; returns its folder."""
    folder = machine / config.run_id
    folder.mkdir(parents=True, exist_ok=True)
    usual = dict(commit="abc", status="ok", start_bytes=2**30, peak_resident_bytes=2**30 * 3, device_kind="cpu")
    experiments_record.write_record(experiments_record.new_record(config, **{**usual, **fields}), folder)
    return folder


@pytest.mark.parametrize("options, remedy", [
    ("--k two", "2,4,8"), ("--repeats 0", "at least 1"), ("--batch 3", "not divisible by k=2"),
])  # fmt: skip
def test_a_bad_plan_is_refused_before_its_first_run(options, remedy, tmp_path, capsys):
    assert suite.main(["--arms", "stock", *options.split(), "--device", "cpu", "--results", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and remedy in errors[0]
    assert not list(tmp_path.iterdir())


def test_only_what_finished_with_this_configuration_on_this_commit_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "run_one", lambda *_: {"status": "error"})

    def skipped(commit="abc", fresh=False, was=CONFIG, **fields):
        monkeypatch.setattr(suite, "source_commit", lambda: commit)
        write_record(tmp_path, was, **fields)
        suite.run_plan([CONFIG], tmp_path, fresh, 60, math.inf)
        return "1 already there" in capsys.readouterr().out

    assert skipped() and skipped(status="oom")
    assert not skipped(status="error") and not skipped(fresh=True) and not skipped(was=replace(CONFIG, steps=3))
    assert not skipped(commit="abd") and not skipped(commit="abc-dirty")


STUB = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
given = dict(word[2:].split("=", 1) for word in sys.argv[3:])
folder = Path(given["results"], given["machine"], given["arm"] + "_test_k2_r0")
def record(**fields):
    folder.mkdir(parents=True, exist_ok=True)
    known = dict(run_id=folder.name, arm=given["arm"], scale="test", k=2, repeat=0, config=dict(), commit="x",
                 status="ok", start_bytes=2**30, peak_resident_bytes=2**31, pid=os.getpid())
    (folder / "run.json").write_text(json.dumps(known | fields))
if given["arm"] != "classic-lean":
    record()
    sys.exit()
{code}
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Runs a suite in which a few lines of Python stand for the process of each run of classic-lean, which `record` a
    finished run like that of the others; returns the exit code."""

    def run(code, arms):
        stub = tmp_path / "python"
        stub.write_text(STUB.format(python=sys.executable, code=code))
        stub.chmod(0o755)
        monkeypatch.setattr(suite.sys, "executable", str(stub))
        return suite.main(["--arms", arms, "--k", "2", "--timeout", "2", "--results", str(tmp_path), *OPTIONS])

    return run


# What the process of a run does -> what the suite says, what the table says, what the folder holds afterwards
OLDER = "the older run"
BEGUN = "record(status='running'); "
ABORTED = "(folder / 'log.txt').write_text('memory allocation of 4096 bytes failed'); os.kill(os.getpid(), 6)"
CHILDREN = {
    "refused": ("sys.exit(2)", "FAILED: refused", "error", OLDER),
    "killed early": ("os.kill(os.getpid(), 9)", "ended by SIGKILL before it began", "error", OLDER),
    "out of memory in C": (BEGUN + ABORTED, "OUT OF MEMORY", "OOM", "ended by SIGABRT before it could report"),
    "deaf and too slow": (BEGUN + "signal.signal(15, signal.SIG_IGN); time.sleep(60)",
                          "FAILED: stopped after --timeout 2 s", "error", "stopped after --timeout 2 s"),
    "failed by its own word": ("record(status='error', error='no')", "some runs failed", "error", "no"),
    "out of memory": ("record(status='oom'); sys.exit(3)", "", "OOM", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHILDREN)
def test_an_older_run_never_passes_for_this_one(case, start, tmp_path, capfd, monkeypatch):
    """An older finished run lies in the folder. Whatever happens to the new one, its peak of 2.00 is not shown, the
    other arm is run, and the exit code tells."""
    code, said, shown, left = CHILDREN[case]
    monkeypatch.setattr(suite, "PATIENCE", 0.5)
    folder = write_record(tmp_path / "here", CONFIG, error=OLDER)
    code, output = start(code, "classic-lean,stock"), capfd.readouterr()
    assert code == (0 if shown == "OOM" else 1) and said in output.out and not output.err, output
    lines = [line.split() for line in output.out.splitlines()]
    assert ["classic-lean", shown] in lines and ["stock", "1.00"] in lines, output.out
    assert read_record(folder)["error"] == left
    assert (tmp_path / "here" / "runs.jsonl").read_text().count("\n") == 2


def test_a_stopped_suite_shows_what_there_is(start, tmp_path, capfd):
    """The signal goes to the suite alone, which tells the run, and waits for its record."""
    code = "def stop(*_):\n    time.sleep(0.5)\n    record(status='error', error='told')\n    sys.exit(1)\n"
    code += f"signal.signal(15, stop); {BEGUN} os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    assert start(code, "stock,classic-lean,shared") == 130
    lines = capfd.readouterr().out.splitlines()[-4:]
    shown = [["stock", "1.00"], ["classic-lean", "stopped"], ["shared", "not begun"]]
    assert [line.split(maxsplit=1) for line in lines[:3]] == shown and lines[3].startswith("stopped by SIGINT")
    assert read_record(tmp_path / "here" / CONFIG.run_id)["error"] == "told"


def test_what_does_not_fit_into_the_minutes_is_left_for_later(tmp_path, capfd):
    options = ["--arms", "shared", "--k", "2", "--minutes", "0", "--results", str(tmp_path)]
    assert suite.main([*options, *OPTIONS]) == EXIT_TIME
    assert capfd.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["shared", "not begun"]


def test_where_runs_would_go_is_printed_and_nothing_is_made(tmp_path, capsys):
    """The scripts ask for it, to draw that folder (test_scripts)."""
    words = ["--arms", "stock", "--print-folder", "--device", "cpu"]
    assert suite.main([*words, "--results", str(tmp_path), "--machine", "box"]) == suite.main(words) == 0
    own = ROOT / "results" / machine_name("cpu", suite.pick_device("cpu")[1])
    assert capsys.readouterr().out == f"{tmp_path / 'box'}\n{own}\n" and not list(tmp_path.iterdir())
