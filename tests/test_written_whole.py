"""What is written is whole or not there, and a command ends in one line whatever the disk or the terminal takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.config import ROOT
from tests.test_visualization import LEGACY, write_run
from visualization import combine_memory_data, create_charts, tables
from visualization.charts import plan
from visualization.files import read_csv, run_cli, whole_file
from visualization.load import load
from visualization.style import save

FULL = OSError(28, "No space left on device")


def full_disk(thing, path, **options):
    """Takes the first bytes of anything, and no more."""
    Path(path).write_bytes(b"the first bytes")
    raise FULL


def test_a_chart_is_whole_or_the_older_one(tmp_path, monkeypatch):
    older = {tmp_path / f"name.{kind}": save(Figure(), tmp_path, "name") and kind for kind in ("png", "svg")}
    before = {path: path.read_bytes() for path in older}
    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space left") as told:
        save(Figure(), tmp_path, "name")
    assert told.value.filename == str(tmp_path / "name.png")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_is_one_line_with_a_remedy_that_exists(tmp_path, monkeypatch, capsys):
    """Of every command that writes: none has half a file afterwards, none names an option that it lacks."""
    machine, page = tmp_path / "here", tmp_path / "README.md"
    write_run(machine)
    page.write_text("<!-- table:peak here -->\nold\n<!-- /table -->\n")
    committed = ROOT / "results" / "plans" / "single_gpu_24gb.json"
    monkeypatch.setattr(Figure, "savefig", full_disk)
    monkeypatch.setattr(combine_memory_data.pd.DataFrame, "to_csv", full_disk)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **options: full_disk(text, path))
    for command, written in (
        (lambda: create_charts.main([str(machine)]), machine / "charts" / "peak_comparison.png"),
        (lambda: combine_memory_data.write(load(machine), machine), machine / "combined_memory.csv"),
        (lambda: plan.main([str(committed), str(tmp_path / "plan.png")]), tmp_path / "plan.png"),
        (lambda: tables.main([str(page), "--write"]), page),
    ):
        assert run_cli(command) == 2
        error = capsys.readouterr().err
        assert error == f"error: {written}: No space left on device; make room and run it again\n"
        assert written == page or not written.exists()
    assert "\nold\n" in page.read_text() and not list(tmp_path.rglob(".*"))


def test_what_is_written_beside_keeps_its_ending(tmp_path):
    with whole_file(tmp_path / "a.svg") as staging:
        staging.write_text("x")
        assert staging.parent == tmp_path and staging.suffix == ".svg" and not (tmp_path / "a.svg").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_a_terminal_of_ascii_ends_nothing(tmp_path):
    for repeat, took in enumerate((1.0, 9.0)):
        write_run(tmp_path / "here", repeat=repeat, samples=20, step_seconds_median=took, sampler=None)
    command = [sys.executable, "-m", "visualization.tables", str(tmp_path / "here")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"") and rb"\u2021" in result.stdout


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8-sig")
    assert read_csv(path, ("a", "b"), "none").to_dict("list") == {"a": [1], "b": [2]}
    combined = tmp_path / "2025" / "combined.csv"
    combined.parent.mkdir()
    combined.write_text((LEGACY / "combined.csv").read_text(), encoding="utf-8-sig")
    for source in (combined, combined.parent):
        assert [(run.arm, run.k) for run in load(source)] == [("Basic", 2), ("Basic", 4), ("String", 2), ("String", 4)]
