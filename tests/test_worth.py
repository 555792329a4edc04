"""The limit that `worth` holds its seconds against is what a counter of operations finds, and its tables and chart."""

import pandas as pd
import pytest

from experiments.bench import group
from experiments.bench.group import PHASES, Group
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.random_models import config_of
from experiments.bench.samples import COLUMNS, Cell
from experiments.bench.work import LIMITED, Work, limit
from experiments.config import ROOT
from experiments.record import write_csv
from visualization.charts import worth as worth_chart
from visualization.files import run_cli
from visualization.pages.side_by_side import decoding_table, read_bench, worth_table

SIZES = Cell("tiny", 24, 5, 3)


@pytest.mark.torch
def test_the_multiplications_are_those_that_run(shared_fork):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = config_of("tiny")
    in_place = {torch.ops.aten.addmm_: lambda x, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    for way, shared in (("whole", False), ("shared", True)):
        # The counter does not know the CPU's kernel
        group = Group(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 512, SIZES)
        work = Work.of(SIZES, shared)
        tokens = work.tokens + (SIZES.k - 1 if shared else 0)  # each completion has the prompt's last token before it
        for phase in LIMITED:
            with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
                getattr(group, phase)(way)
            counted = {str(op): flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}
            linear = sum(n for op, n in counted.items() if op != "aten.bmm")
            without_attention = Work(tokens, 0, work.scored).multiplications(config, phase)
            if shared and phase == "train":  # nothing of the prompt's last layer but keys and values has a gradient
                per_token = config.hidden_size * (2 * 4 * 64 + 3 * config.intermediate_size)
                without_attention -= 2 * (SIZES.prompt_tokens - 1) * per_token
            assert linear == without_attention, (way, phase)
            if way == "whole" and phase == "score":  # eager attention takes whole squares
                square = Work(0, SIZES.k * (SIZES.prompt_tokens + SIZES.completion_tokens) ** 2, 0)
                assert counted["aten.bmm"] == square.multiplications(config, phase)


@pytest.mark.torch
def test_ways_that_differ_in_their_passes_alone_do_not_generate_again(monkeypatch, shared_fork):
    monkeypatch.setattr(group, "keep_freed_memory", lambda: None)  # of this process
    worth = MEASUREMENTS["worth"].start(SIZES, ("whole", "shared", "shared-2"), None)
    whole, shared, passes = (worth.sample(way) for way in ("whole", "shared", "shared-2"))
    wall = {f"{phase}_seconds" for phase in PHASES}
    assert whole.keys() > shared.keys() > wall and "train_limit" in whole
    assert wall - passes.keys() == {"generate_seconds"}


def test_the_limit_is_what_tokens_and_pairs_leave():
    """One token a completion and none of the width in attention: rows over the rows that are needed."""
    config = config_of("narrow")
    config.vocab_size = 1
    assert limit(config, Cell("-", 1000, 1, 8), "score") == pytest.approx(8 * 1001 / 1008, rel=0.15)
    assert limit(config, Cell("-", 2, 5000, 8), "train") == pytest.approx(1.0, abs=0.001)


def rows_of(measurement, cell, way, repeats=1, **metrics):
    """Rows of bench.csv: each metric the same in all repeats, or (median, lowest, highest)."""
    about = dict.fromkeys(COLUMNS, "x") | dict(zip(COLUMNS[1:5], cell, strict=True))
    about |= {"measurement": measurement, "way": way, "repeats": repeats, "failure": "", "device_kind": "cpu"}
    spans = {name: value if isinstance(value, tuple) else (value,) * 3 for name, value in metrics.items()}
    return [
        about | {"metric": name} | dict(zip(("median", "low", "high"), span, strict=True))
        for name, span in spans.items()
    ]


def test_the_chart_shows_each_cell_and_a_damaged_table_is_one_line(tmp_path, capsys):
    seconds = {"whole": 6, "shared": 2, "shared-2": 3, "shared-micro-2": 2.5}
    rows = []
    for completion in (100, 1000):
        for way, s in seconds.items():
            more = {"train_limit": 5.5} if way == "whole" else {}
            more |= {"generate_seconds": s} if way in ("whole", "shared") else {}  # the others generate as `shared`
            rows += rows_of("worth", ("wide", 3000, completion, 8), way, train_seconds=s, score_seconds=1, **more)
    write_csv(tmp_path / "bench.csv", COLUMNS, rows)
    figure = worth_chart.chart(read_bench(tmp_path, "worth"))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    train = "3.00 x together\n2.00 x two a pass\n2.40 x two a micro-batch\nlimit 5.50 x"
    step = "2.60 x together\n2.17 x two a pass\n2.36 x two a micro-batch"  # 6 + 1 + 6 s over 2 + 1 + 2, 2 + 1 + 3 ...
    assert texts == [train, train, step, step]

    cells = "5.50 x | 3.00 x | 2.00 x | 2.40 x | 2.60 x | 2.17 x | 2.36 x |"
    assert f"| wide | 3,000 | 100 | {cells}" in worth_table(tmp_path)

    def draw():
        return worth_chart.main([str(tmp_path), str(tmp_path / "worth.png")])

    assert run_cli(draw) == 0 and (tmp_path / "worth.png").stat().st_size > 10_000
    write_csv(tmp_path / "bench.csv", COLUMNS, [{**rows[0], "median": "fast"}])
    assert run_cli(draw) == 2 and "line 2, median" in capsys.readouterr().err


def test_the_table_of_generation_shows_medians_and_who_is_faster(tmp_path):
    cell = ("wide", 8000, 64, 32)
    rows = rows_of("decoding", cell, "whole", 3, generate_seconds=(9.0, 8.5, 9.5))
    rows += rows_of("decoding", cell, "shared", 3, generate_seconds=(3.0, 2.5, 3.5))
    write_csv(tmp_path / "bench.csv", COLUMNS, rows)
    assert "| wide | 8,000 | 64 | 32 | 9.00 | 3.00 | 3.00 x |" in decoding_table(tmp_path)
    assert "median of 3 alternating repeats" in decoding_table(tmp_path)


def test_what_was_measured_is_what_is_on_the_list():
    """Names of the committed rows: a table of them would otherwise be empty."""
    for path in sorted((ROOT / "results").glob("*/bench.csv")):
        rows = pd.read_csv(path)
        for name, mine in rows.groupby("measurement"):
            listed = MEASUREMENTS[name]
            assert set(mine.model) <= set(listed.models) and set(mine.way) <= set(listed.ways), (path, name)
