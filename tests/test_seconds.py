"""Seconds of repeats that are too far apart: said wherever they are shown, and no part of a comparison."""

import pandas as pd
import pytest

from tests.test_page import Page
from tests.test_visualization import ROOT, texts, write_run
from visualization import tables
from visualization.charts import worth
from visualization.charts.idea import idea
from visualization.load import load_machine
from visualization.page import build
from visualization.pages.side_by_side import read_bench
from visualization.runs import GIB
from visualization.seconds import APART, MARK, NOTE, Seconds

TOOK = {  # at k = 8, in three repeats
    "stock": (54.0, 55.0, 56.0),
    "stock-accumulate": (60.0, 61.0, 62.0),
    "stock-compact": (20.0, 21.0, 22.0),
    "shared": (7.5, 61.0, 45.0),
    "shared-accumulate": (7.0, 90.0, 80.0),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = tmp_path_factory.mktemp("results") / "here"
    for arm, seconds in TOOK.items():
        for repeat, took in enumerate(seconds):
            write_run(machine, arm, 8, repeat, above=GIB, scale="bench", step_seconds_median=took)
    return machine


def test_where_the_limit_is():
    assert Seconds((1.0, APART)).answer == 1.25 and not Seconds((1.0, APART)).mark
    assert Seconds((1.0, 1.51)).mark == MARK and Seconds((1.0, 1.51)).answer is None
    assert Seconds((0.0, 0.1)).mark and not Seconds((5.0,)).mark and Seconds(()).shown(1) == ""


def test_tables_mark_them_and_compare_them_with_nothing(machine):
    speed, phases, summary = (tables.render(name, machine, "bench") for name in ("speed", "phases", "summary"))
    assert f"| `shared` | 45.00 (7.50 to 61.00){MARK} |" in speed and "| `stock` | 55.00 (54.00 to 56.00) |" in speed
    assert f"| 45.0{MARK} |" in phases and "| 21.0 (2.6 x) |" in phases
    assert f"| prefix sharing, two completions at a time | 80.0{MARK} |  | 1.00 |" in summary
    assert all(text.endswith(f"\n{NOTE}.\n") for text in (speed, phases, summary))
    assert MARK not in tables.render("peak", machine, "bench")


def test_charts_mark_them(machine):
    shown = texts(idea(load_machine(machine)))
    assert any(f"80.0{MARK}" in text for text in shown) and any(NOTE in text for text in shown)


def test_the_page_answers_without_them(machine):
    text = " ".join(" ".join(Page(build.report(machine, load_machine(machine), [])).text).split())
    first = text[text.index("How much time?", 300) : text.index("Every run", 300)]
    assert "No arm of this project finished beside a rival here." in first
    told = "The seconds of shared at k = 8, shared-accumulate at k = 8 tell nothing: repeats are too far apart"
    assert told in first and f"45.00{MARK} (7.50 to 61.00)" in first and NOTE in first
    assert f"seconds a step of all repeats 7.5 to 61.0. {NOTE}" in text


@pytest.mark.parametrize("name, metric", [
    ("rivals", "train_seconds"), ("families", "train_seconds"), ("worth", "train_seconds"),
    ("decoding", "generate_seconds"),
])  # fmt: skip
def test_measurements_side_by_side_do_the_same(tmp_path, name, metric):
    """Of the committed ones, one repeat of sharing took ten times as long."""
    committed = ROOT / "results" / "reference-cpu-2-cores"
    assert MARK not in tables.render(name, committed)
    rows = pd.read_csv(committed / "bench.csv", keep_default_na=False)
    rows.loc[(rows.measurement == name) & (rows.metric == metric) & (rows.way != "whole"), "high"] *= 10
    rows.to_csv(tmp_path / "bench.csv", index=False)
    text = tables.render(name, tmp_path)
    assert text.count(MARK) > 2 and text.endswith(f"\n{NOTE}.\n") and "nan" not in text
    if name == "worth":
        shown = texts(worth.chart(read_bench(tmp_path, "worth")))
        assert any(f"{MARK} together" in text for text in shown) and any(NOTE in text for text in shown)
