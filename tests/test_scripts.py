"""The scripts at the root, with stubs for Python: paths of the caller; the set-up; and the program for a bare GPU
machine, where what is there is not measured again, an item that fails keeps no other one from running, and an archive
is left by whatever ends it."""

import importlib
import os
import shutil
import signal
import subprocess
import tarfile

import pytest

from experiments.config import ROOT
from tests.waiting import until

STUB = """#!/bin/bash
case "$*" in
  --version) echo Python 3.11.0 ;;
  "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *" pip "*) echo "$*" >> calls; if [ -n "$PIP" ]; then echo "$PIP" && exit 1; fi ;;
  *"import os, torch"*) exit 1 ;;
esac
"""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.fixture
def set_up(tmp_path):
    """Runs `setup_env.sh` in a copy that is set up; returns its exit code and the lines it said."""
    lock = "numpy==1.0\ntorch==2.0\n"
    write(tmp_path, {"pyproject.toml": "", "requirements.lock": lock, "stub": STUB})
    shutil.copy(ROOT / "setup_env.sh", tmp_path)

    def run(*words, **environment):
        here = os.environ | {"PYTHON": str(tmp_path / "stub"), "PIP": ""} | environment
        result = subprocess.run([tmp_path / "setup_env.sh", *words], env=here, capture_output=True, text=True)
        return result.returncode, (result.stdout + result.stderr).splitlines()

    code, said = run("--cpu")
    assert code == 0 and said[-1] == "environment: ready" and "the other 1 packages" in said[2]
    return run


def test_what_is_up_to_date_stays_and_changed_commands_alone_are_installed_anew(set_up, tmp_path):
    assert set_up() == (0, ["environment: up to date (.venv)"]) and set_up("--quiet") == (0, [])
    (tmp_path / "calls").unlink()
    write(tmp_path, {"pyproject.toml": "[project]"})
    assert set_up() == (0, ["environment: up to date (.venv), with this clone's commands installed anew"])
    assert (tmp_path / "calls").read_text().count("--no-index") == 1


@pytest.mark.parametrize("words, environment, expected", [
    ("", {"PIP": "ERROR: No torch"}, ["pip failed on torch (ERROR: No torch)", "setup_env.log"]),
    ("--use-system-torch", {}, ["cannot import torch", "without the option"]),
    ("", {"PYTHON": "/nowhere/python"}, ["no Python 3.11 or newer", "PYTHON=/path/to/python"]),
    ("--quit", {}, ["unknown option --quit", "--help"]),
])  # fmt: skip
def test_a_set_up_that_fails_says_why_in_one_line_and_the_old_environment_is_there(
    set_up, tmp_path, words, environment, expected
):
    write(tmp_path, {".venv/old": "", "requirements.lock": "numpy==2.0\ntorch==2.0\n"})
    code, said = set_up(*words.split(), **environment)
    errors = [line for line in said if line.startswith("setup_env: ")]
    assert code == 2 and said[-1:] == errors and all(text in errors[0] for text in expected)
    assert (tmp_path / ".venv" / "old").exists() and not (tmp_path / ".venv.old").exists()
    assert set_up("--cpu")[0] == 0 and not (tmp_path / ".venv" / "old").exists()


@pytest.mark.parametrize("script", ["run_baseline-rloo.sh", "run_improve-rloo.sh", "run_bench.sh"])
def test_a_run_is_where_the_caller_stands_and_its_help_needs_nothing_installed(script, tmp_path):
    python = f'#!/bin/bash\necho "$PWD: $@" >> {tmp_path}/calls; [ "${{@: -1}}" != --print-folder ] || echo my/box\n'
    write(tmp_path, {"clone/setup_env.sh": "", "clone/.venv/bin/python": python, "elsewhere/x": ""})
    write(tmp_path, {"clone/experiments/start.sh": (ROOT / "experiments" / "start.sh").read_text()})
    for words, said in (["--help"], "Usage: ./" + script), (["--results", "mine"], "results: my/box\nnext: "):
        shutil.copy(ROOT / script, tmp_path / "clone")
        command = [tmp_path / "clone" / script, *words]
        assert said in subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True).stdout
        assert (tmp_path / "calls").exists() is (words != ["--help"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(line.startswith(f"{tmp_path}/elsewhere: -m ") for line in calls)
    assert sum(" --results mine" in line for line in calls) >= 2


# In the place of a Python with torch: answers what is asked first, and does what the file named as the item says
OF_ITEMS = """#!/bin/bash
case "$*" in
  *--print-folder) echo {folder}/results/box && exit ;; *source_commit*) echo abc && exit ;; -c*) exit ;;
  *collect_env) echo the driver && exit ;;
esac
echo "$*" >> {folder}/asked
echo "last words"
if [ -f "{folder}/$2" ]; then . "{folder}/$2"; fi
"""


@pytest.fixture
def start(tmp_path):
    write(tmp_path, {"python": OF_ITEMS.format(folder=tmp_path)})
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out.tar.gz")}

    def run(*names, minutes="5"):
        command = [ROOT / "run_gpu.sh", *names, "--results", tmp_path / "results"]
        return subprocess.Popen(command, env={**environment, "MINUTES": minutes}, stdout=-1, stderr=-2, text=True)

    return run


def test_items_go_on_after_one_that_fails_and_nothing_is_measured_twice(start, tmp_path):
    (tmp_path / "experiments.checks.exactness").write_text("exit 1")
    (tmp_path / "experiments.bench").write_text("exit 4")
    said = start("planner", "exactness", "cells-first").communicate(timeout=60)[0]
    assert "exactness: failed, " in said and "cells-first: done, not as it should be" in said, said
    again = start("planner", "exactness", "cells-first")
    assert "planner: there" in again.communicate(timeout=60)[0] and again.returncode == 1
    asked = [line.split()[1] for line in (tmp_path / "asked").read_text().splitlines()]
    ran = ("checks.exactness", "bench", "checks.planner_check", "checks.exactness")
    assert asked == [f"experiments.{name}" for name in ran]
    assert "exactness: not begun, " in start("exactness", minutes="1").communicate(timeout=60)[0]
    assert start("nope").communicate(timeout=60)[0].startswith("run_gpu.sh: unknown item or option nope;")


def test_what_is_killed_leaves_an_archive(start, tmp_path):
    does = f"touch {tmp_path}/begun; trap 'exit 143' TERM; sleep 60 & wait"
    (tmp_path / "experiments.bench").write_text(does)
    process = start("exactness", "cells-first")
    until((tmp_path / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    with tarfile.open(tmp_path / "out.tar.gz") as packed:
        assert {"box/on_gpu/exactness.done", "box/on_gpu/cells-first.log"} <= set(packed.getnames())
        assert packed.extractfile("box/on_gpu/device.txt").read() == b"the driver\n"


def test_every_item_is_a_command_that_its_program_takes(tmp_path, capsys):
    """All that can be wrong with it here is that there is no such device."""
    listed = subprocess.run([ROOT / "run_gpu.sh", "--list"], capture_output=True, text=True, check=True).stdout
    items = [line.split() for line in listed.splitlines() if line]
    assert len(items) > 10
    for name, _, _, module, *options in items:
        program = importlib.import_module(f"experiments.{module}" + (".__main__" if module == "bench" else ""))
        where = ["--device", "cuda", "--results", str(tmp_path), "--machine", "x"]
        assert program.main([*options, *where]) == 2, name
        assert "device 'cuda' is not usable here" in capsys.readouterr().err, name
