"""Runs that cannot be used are named in one line each, and the rest is shown."""

import pytest

from tests.test_visualization import texts, write_run
from visualization import create_charts, report, tables
from visualization.charts.peak_comparison import peak_comparison
from visualization.files import run_cli
from visualization.load import load_machine, tell_damaged


@pytest.mark.parametrize("text", ["", '{"run_id": ', "[1, 2]", '{"status": "ok"}', None])
def test_a_damaged_run_is_named_in_one_line_and_the_others_are_shown(tmp_path, capsys, text):
    write_run(tmp_path, "classic-baseline")
    bad = write_run(tmp_path, "stock") / "run.json"
    bad.unlink() if text is None else bad.write_text(text)
    runs = load_machine(tmp_path)
    assert [(run.arm, run.k, run.status) for run in runs] == [("classic-baseline", 2, "ok"), ("stock", 2, "damaged")]
    assert tell_damaged(runs) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"left out: {bad}: ") and "; delete the run" in error
    shown = tables.render("peak", tmp_path)
    assert "| `classic-baseline` | 0.98 |" in shown and "| `stock` | damaged |" in shown
    assert "damaged and left out: stock_cpu_k2_r0." in shown


@pytest.mark.slow
def test_every_command_shows_what_is_whole_and_exits_with_1(tmp_path, capsys):
    machine = tmp_path / "here"
    write_run(machine)
    for repeat in range(2):
        (write_run(machine, "stock", repeat=repeat) / "run.json").write_text("7")
    write_run(machine, "shared", scale="short").rename(machine / "a copy")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:peak here -->\n<!-- /table -->\n")
    for command in (
        lambda: create_charts.main([str(machine)]),
        lambda: tables.main([str(machine)]),
        lambda: tables.main([str(readme), "--write"]),
        lambda: report.main([str(machine)]),
    ):
        assert run_cli(command) == 1
        errors = capsys.readouterr().err.splitlines()
        assert [error.split(":")[1].split("/")[-2] for error in errors] == [
            "a copy",
            "stock_cpu_k2_r0",
            "stock_cpu_k2_r1",
        ]
    assert (machine / "charts" / "peak_comparison.png").exists()
    shown = texts(peak_comparison([run for run in load_machine(machine) if run.scale]))
    assert "damaged" in shown and any("left out: stock_cpu_k2_r0, stock_cpu_k2_r1" in line for line in shown)
    assert "| `classic-baseline` | 0.98 |" in readme.read_text()


def test_a_folder_where_nothing_can_be_used_is_refused(tmp_path, capsys):
    for repeat in range(3):
        (write_run(tmp_path, repeat=repeat) / "run.json").write_text("7")
    assert run_cli(lambda: create_charts.main([str(tmp_path)])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "classic-baseline_cpu_k2_r0/run.json: " in error and "2 more" in error
