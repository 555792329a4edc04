"""What `./visualize_results.sh` does, and the one screen that it ends with."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from experiments.config import ROOT
from tests.test_visualization import texts, write_run
from visualization.charts.peak_comparison import peak_comparison
from visualization.load import load_machine
from visualization.pages.results import peak_table
from visualization.report import SCREEN, WIDTH, screen
from visualization.runs import GIB, MIB

# In the place of .venv/bin/python: the harness only says what it was asked, the rest is this project's own
PYTHON = """#!/usr/bin/env bash
echo "$@" >> asked
case "$2" in
  experiments.run_device) echo here ;;
  experiments.record) echo "runs.jsonl: 2 run(s)" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def copy(tmp_path):
    """A folder with visualize_results.sh and two machines; `here` is the one it runs on."""
    shutil.copy(ROOT / "visualize_results.sh", tmp_path)
    for path, text in {
        "setup_env.sh": "#!/usr/bin/env bash\n",
        ".venv/bin/python": PYTHON.format(python=sys.executable),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    for machine in ("here", "there"):
        write_run(tmp_path / "results" / machine, above=1200 * MIB)
        write_run(tmp_path / "results" / machine, "classic-string", above=300 * MIB, fed=1024)
    return tmp_path


def visualize(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH)}  # xdist sets a narrow one
    command = ["./visualize_results.sh", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


def test_a_run_without_its_samples_is_named_in_the_page_and_on_stderr(copy):
    """The samples stay where they were measured: a clone has the records alone."""
    (copy / "results/here/classic-string_cpu_k2_r0/memory.csv").unlink()
    result = visualize(copy)
    assert result.returncode == 0
    assert "no timeline of 1 run(s) of scale cpu: their samples are not in results/here" in result.stderr
    page = (copy / "results/here/report.html").read_text()
    assert "No curve, because the samples are not in this folder: classic-string_cpu_k2_r0.<" in page


def test_without_arguments_it_draws_its_own_machine_and_ends_with_one_screen(copy):
    result = visualize(copy)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) <= SCREEN
    asked = (copy / "asked").read_text().splitlines()
    assert asked == [
        "-m experiments.run_device",
        "-m experiments.record results/here",
        "-m visualization.report results/here",
    ]
    here, there = ({path.name for path in (copy / "results" / name).iterdir()} for name in ("here", "there"))
    assert {"charts", "combined_memory.csv", "combined_statistics.csv", "report.html"} == here - there
    assert (copy / "results" / "here" / "charts" / "tables.md").read_text().startswith("## peak")
    assert "75 % less than classic-baseline at k = 2, and it fed 1,024 of 3,000 prompt tokens" in result.stdout


def test_help_is_one_help_and_does_nothing(copy):
    result = visualize(copy, "--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: ./visualize_results.sh [results/MACHINE ...]")
    assert len(result.stdout.splitlines()) < SCREEN and "usage" not in result.stdout
    assert not (copy / "asked").exists()


def test_no_results_yet_is_one_line_and_damage_is_exit_1(copy):
    (copy / "results" / "there" / "classic-string_cpu_k2_r0" / "run.json").write_text("7")
    result = visualize(copy, "results/there", "results/here")
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "holds no JSON object" in result.stderr
    assert (copy / "results" / "here" / "charts" / "tables.md").exists()
    shutil.rmtree(copy / "results" / "here")
    result = visualize(copy)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "results/here" in result.stderr


def test_the_screen_says_peaks_and_what_they_mean(tmp_path):
    machine = tmp_path / "here"
    for k in (2, 4):
        write_run(machine, "classic-baseline", k, above=k * GIB // 2, status="ok" if k == 2 else "oom")
        write_run(machine, "classic-string-exact", k, above=k * GIB // 2)
        write_run(machine, "classic-lean", k, above=GIB // 4)
        write_run(machine, "stock", k, above=3 * GIB)
        write_run(machine, "stock-accumulate", k, above=2 * GIB)
        write_run(machine, "shared", k, above=GIB // 5)
    write_run(machine, "stock-compact", 2, status="running")
    write_run(machine, "shared", 8, scale="bench")
    lines = screen(machine, load_machine(machine))
    assert len(lines) <= SCREEN and max(len(line) for line in lines if str(machine) not in line) <= WIDTH
    text = "\n".join(lines)
    assert "classic-baseline" in text and "1.00  out of memory  TRL 0.21 as it is" in text
    assert re.search(r"stock-compact +killed", text)
    assert "published in 2025: not compared, no k where it and classic-baseline finished." in text
    assert "nothing cut: 0 % less than classic-baseline at k = 2." in text
    assert "classic-lean 75 % less than classic-baseline at k = 2; shared 90 % less than stock-accumulate" in text
    assert f"{machine}/charts/tables.md, also of the scales bench" in text


def test_percentages_of_next_to_nothing_are_not_told(tmp_path):
    for arm, above in (("classic-baseline", GIB // 50), ("classic-lean", GIB // 60)):
        write_run(tmp_path / "here", arm, 2, above=above)
    runs = load_machine(tmp_path / "here")
    text = "\n".join(screen(tmp_path / "here", runs))
    assert "classic-lean classic-baseline takes 0.02 GiB at k = 2, too little to compare" in text and "%" not in text
    assert "%" not in "".join([*peak_table(runs), *texts(peak_comparison(runs))])


def test_verdicts_are_whole_in_a_narrow_terminal(tmp_path):
    for arm, above in (("classic-baseline", GIB), ("classic-string", GIB // 4)):
        write_run(tmp_path / "here", arm, above=above, fed=61)
    lines = screen(tmp_path / "here", load_machine(tmp_path / "here"), width=60)
    start = next(number for number, line in enumerate(lines) if line.startswith("The change published"))
    assert max(len(line) for line in lines[start : start + 4]) <= 60
    assert "less than classic-baseline at k = 2, and it fed 61 of 3,000 prompt tokens." in " ".join(lines)


def test_the_screen_stays_one_screen_with_many_arms(tmp_path):
    for number in range(30):
        write_run(tmp_path, f"arm-{number}", samples=20)
    lines = screen(tmp_path, load_machine(tmp_path))
    assert len(lines) == SCREEN and any("more arms in tables.md" in line for line in lines)
