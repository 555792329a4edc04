"""The scripts at the root: paths of the caller, and the set-up with a stub for Python and its pip."""

import os
import shutil
import subprocess

import pytest

from experiments.config import ROOT

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
