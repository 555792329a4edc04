"""What pages say to try: the commands of docs/tutorial.md run as they stand, the planner says what pages say of it,
examples/share_prompts.ipynb trains cell by cell."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import ROOT

TEXT = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.slow
def test_everything_to_try_runs_in_its_order_and_the_planner_prints_the_table(tmp_path):
    script = "set -e\n" + "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    programs = Path(sys.executable).parent
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    printed = result.stdout.splitlines()
    table = re.search(r"^```\n(peak allocated, GiB.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert len(table) == 4 and set(table) <= set(printed)
    assert any(line.startswith("trained 3 updates in ") for line in printed)
    assert any(line.startswith("fits: 18.57 GiB") for line in printed) and "prefix_sharing: true" in printed
    for pattern in re.findall(r"^prefix sharing \w+: .*$", TEXT, re.MULTILINE):
        expected = re.escape(pattern).replace(re.escape("..."), r"[\d.,]+")
        assert any(re.fullmatch(expected, line) for line in printed), pattern


def test_readme_says_what_the_tutorial_shows_of_the_same_command():
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"TRL is short by (\S+) GiB, by (\S+) with one .*? fits with a peak of (\d+\.\d+)", text).groups()
    assert re.search(r"rloo-memory plan --model \S+8B .*?--device-memory \S+", text)[0] in TEXT
    short = re.findall(r"^stock.* short by (\S+) GiB$", TEXT, re.MULTILINE)
    (peak,) = re.findall(r"^shared .* (\S+)\* .* yes$", TEXT, re.MULTILINE)
    assert said == (*short, peak)


def test_what_the_training_script_cannot_do_is_said_at_once(tmp_path):
    """From another folder."""
    command = [sys.executable, ROOT / "examples" / "train_with_prefix_sharing.py", "--k", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "--k 1" in result.stderr and "at least 2 completions" in result.stderr


@pytest.mark.slow
def test_the_notebook_trains_and_shares(tmp_path):
    cells = json.loads((ROOT / "examples" / "share_prompts.ipynb").read_text())["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip" in programs[0] and not any(
        "%" in line[:1] for program in programs[1:] for line in program.splitlines()
    )
    end = "assert found['shared prompts']['tokens of whole rows for each one'] > 3; plt.savefig('chart.png')"
    program = "\n".join(["import matplotlib; matplotlib.use('agg')", *programs[1:], end])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "share_prompts: each prompt is computed once for its 8 completions" in run.stdout
    assert (tmp_path / "chart.png").stat().st_size > 5000
