"""The scripts at the root: a help of their own that is true, paths of the caller, and what comes next."""

import re
import shutil
import subprocess

import pytest

from experiments import suite
from experiments.config import ROOT

PROGRAMS = {  # whose options they pass on
    "run_baseline-rloo.sh": (suite, []),
    "run_improve-rloo.sh": (suite, []),
    "run_bench.sh": (suite, []),
    "run_gpu.sh": (None, []),
    "visualize_results.sh": (None, []),
}
# In the place of .venv/bin/python: notes where it stands and what it is asked, and knows where results are
PYTHON = """#!/bin/bash
echo "$PWD: $@" >> {noted}
case "$*" in *--print-folder) echo "$PWD/my own/box" && exit ;; esac
case "$*" in *"$FAILS"*) exit "$CODE" ;; esac
"""


@pytest.mark.parametrize("script", PROGRAMS)
def test_help_is_short_its_own_and_true(script, tmp_path, capsys):
    """Nothing is installed there, and nothing is made."""
    shutil.copy(ROOT / script, tmp_path)
    result = subprocess.run([tmp_path / script, "--help"], capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.match(rf"Usage: (MINUTES=9 )?\./{script} ", result.stdout) and len(result.stdout.splitlines()) < 12
    program, words = PROGRAMS[script]
    if program:
        with pytest.raises(SystemExit):
            program.run([*words, "--help"])
        known = capsys.readouterr().out
        assert all(option in known for option in re.findall(r"--[a-z][a-z-]+", result.stdout))
    assert [path.name for path in tmp_path.iterdir()] == [script]


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts and stand-ins, and another one to stand in."""
    (tmp_path / "clone" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "elsewhere" / "experiments").mkdir(parents=True)
    for script in PROGRAMS:
        shutil.copy(ROOT / script, tmp_path / "clone")
    for name, text in {
        "setup_env.sh": "#!/bin/bash\n", ".venv/bin/python": PYTHON.format(noted=tmp_path / "noted"),
    }.items():  # fmt: skip
        (tmp_path / "clone" / name).write_text(text)
        (tmp_path / "clone" / name).chmod(0o755)
    return tmp_path


def start(clone, script, *options, fails="nothing", code=0):
    environment = {"PATH": "/usr/bin:/bin", "FAILS": fails, "CODE": str(code)}
    return subprocess.run(
        [clone / "clone" / script, *options], cwd=clone / "elsewhere", env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("script, after", [
    ("run_baseline-rloo.sh", "next: {clone}/run_improve-rloo.sh --results mine --k 2"),
    ("run_improve-rloo.sh", "next: {clone}/visualize_results.sh {stand}/my\\ own/box"),
    ("run_bench.sh", "next: open {stand}/my own/box/report.html"),
])  # fmt: skip
def test_a_run_stays_where_the_caller_stands_and_says_what_comes_next(clone, script, after):
    result = start(clone, script, "--results", "mine", "--k", "2")
    stand = clone / "elsewhere"
    told = [f"results: {stand}/my own/box", after.format(clone=clone / "clone", stand=stand)]
    assert (result.returncode, result.stdout.splitlines()[-2:]) == (0, told), result.stderr
    noted = (clone / "noted").read_text().splitlines()
    assert all(line.startswith(f"{stand}: -m ") for line in noted)
    suites = [line for line in noted if "experiments.suite" in line and "--print-folder" not in line]
    assert len(suites) == (9 if script == "run_bench.sh" else 1)
    assert all(line.endswith(" --results mine --k 2") for line in suites)
    assert (f"{stand}: -m visualization.report {stand}/my own/box" in noted) == (script == "run_bench.sh")
    result = start(clone, script, "--results", "mine", "--k", "2", fails="experiments.suite", code=2)
    assert (result.returncode, result.stdout) == (2, ""), "a bad option leads nowhere"
    result = start(clone, script, "--results", "mine", "--k", "2", fails="experiments.suite", code=1)
    assert (result.returncode, result.stdout.splitlines()[-2:]) == (1, told), "some run failed, the others are there"


def test_folders_to_draw_are_the_callers(clone):
    assert start(clone, "visualize_results.sh", "mine/box").returncode == 0
    assert (clone / "noted").read_text().splitlines() == [
        f"{clone}/elsewhere: -m experiments.record mine/box", f"{clone}/elsewhere: -m visualization.report mine/box"
    ]  # fmt: skip
