"""The bench's charts and table, on small machine folders."""

import pytest

from tests.test_visualization import texts, write_run
from visualization import tables
from visualization.charts.peak_by_k import peak_by_k
from visualization.load import load_machine
from visualization.runs import GIB, compared


@pytest.fixture
def machine(tmp_path):
    """`stock` and `shared` at k=8, `shared` at two more k; one arm that ran out of memory."""
    machine = tmp_path / "here"
    for repeat in range(3):
        write_run(machine, "stock", 8, repeat, above=4 * GIB, step_seconds_median=100.0 + repeat)
        write_run(machine, "shared", 8, repeat, above=GIB // 2, step_seconds_median=10.0)
    write_run(machine, "classic-baseline", 8, status="oom")
    write_run(machine, "shared", 2, above=GIB // 2)
    write_run(machine, "shared", 32, above=GIB // 2)
    return machine


def test_lines_need_three_k(machine):
    assert peak_by_k([run for run in load_machine(machine) if run.k != 32]) is None


def test_peak_by_k_is_drawn_at_the_measured_peaks(machine):
    axes = peak_by_k(load_machine(machine)).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["shared"].get_xdata()) == [2, 8, 32]
    assert list(lines["shared"].get_ydata()) == [0.5, 0.5, 0.5]
    assert list(lines["stock"].get_ydata()) == [4.0]


def test_phases_table_compares_with_stock_at_the_k_of_most_arms(machine):
    assert {cell.k for cell in compared(load_machine(machine))} == {8}
    text = tables.render("phases", machine)
    # 8 x 3,100 tokens against 3,000 + 8 x 100
    assert "At k = 8; in brackets" in text and "token ratio is 6.53. Seconds:" in text
    assert "| `stock` | 10.0 | 10.0 | 10.0 | 101.0 | 4.00 |" in text
    assert "| `shared` | 10.0 (1.0 x) | 10.0 (1.0 x) | 10.0 (1.0 x) | 10.0 (10.1 x) | 0.50 (1/8.0) |" in text
    assert "| `classic-baseline` | OOM | OOM | OOM | OOM | OOM |" in text


def test_peak_by_k_crosses_what_ran_out_and_only_names_what_was_killed(machine):
    write_run(machine, "stock-compact", 8, status="running")
    figure = peak_by_k(load_machine(machine))
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(8, 4)]  # the budget in GiB
    shown = " ".join(" ".join(texts(figure)).split())
    assert "where out of memory: classic-baseline k=8 (OOM), stock-compact k=8 (killed)" in shown
