"""The limit that `experiments.evidence.worth` holds its seconds against is what a counter of operations finds."""

import pandas as pd
import pytest

from experiments.builds import use_fork
from experiments.config import ROOT
from experiments.evidence import decoding, worth
from experiments.evidence.group import Group, Sizes
from experiments.evidence.worth import Work
from experiments.record import write_csv
from rloo_memory.arms import ARMS
from rloo_memory.plan.levers import MEASURED
from visualization.charts import worth as worth_chart
from visualization.files import run_cli
from visualization.pages.rivals import decoding_table, faster, read_worth, worth_table

SIZES = Sizes(prompt=24, completion=5, k=3)


@pytest.mark.torch
def test_the_multiplications_are_those_that_run():
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    use_fork(ARMS["shared"])
    config = worth.shape_config("qwen3-8-layers", 512)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    in_place = {torch.ops.aten.addmm_: lambda x, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    for way, shared in (("whole", False), ("shared", True)):
        # The counter does not know the CPU's kernel
        group = Group(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 512, SIZES)
        work = Work.of(SIZES, shared)
        tokens = work.tokens + (SIZES.k - 1 if shared else 0)  # each completion has the prompt's last token before it
        for phase in worth.LIMITED:
            with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
                getattr(group, phase)(way)
            counted = {str(op): flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}
            linear = sum(n for op, n in counted.items() if op != "aten.bmm")
            without_attention = Work(tokens, 0, work.scored).multiplications(config, phase)
            if shared and phase == "train":  # nothing of the prompt's last layer but keys and values has a gradient
                per_token = config.hidden_size * (2 * 4 * 64 + 3 * config.intermediate_size)
                without_attention -= 2 * (SIZES.prompt - 1) * per_token
            assert linear == without_attention, (way, phase)
            if way == "whole" and phase == "score":  # eager attention takes whole squares
                square = Work(0, SIZES.k * (SIZES.prompt + SIZES.completion) ** 2, 0)
                assert counted["aten.bmm"] == square.multiplications(config, phase)


def test_the_limit_is_what_tokens_and_pairs_leave():
    """One token a completion and none of the width in attention: rows over the rows that are needed."""
    config = worth.shape_config("qwen3-8-layers", 1)
    assert worth.limit(config, Sizes(1000, 1, 8), "score") == pytest.approx(8 * 1001 / 1008, rel=0.15)
    assert worth.limit(config, Sizes(2, 5000, 8), "train") == pytest.approx(1.0, abs=0.001)


def test_the_doctor_says_what_was_measured():
    """The slowest and the fastest of both CPUs."""
    machines = [path.parent for path in sorted((ROOT / "results").glob("*/worth.csv"))]
    measured = pd.concat([faster(read_worth(machine), "train") for machine in machines])
    prompt, completion = (measured.index.get_level_values(f"{what}_tokens") for what in ("prompt", "completion"))
    cells = measured.groupby((8 * (prompt + completion) / (prompt + 8 * completion)).round(1))
    found = {ratio: (cell.min(axis=None).round(1), cell.max(axis=None).round(1)) for ratio, cell in cells}
    assert found.items() >= MEASURED.items()


@pytest.mark.parametrize("cells", ["3000", "3000x", "1x1", "0x100", "9999999x1", "3000x100,3000x100", "a x b", ""])
def test_bad_cells_are_one_line(cells, tmp_path, capsys):
    assert worth.main(["--cells", cells, "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.rglob("*"))


def test_the_chart_shows_each_cell_and_a_damaged_table_is_one_line(tmp_path, capsys):
    row = dict.fromkeys(worth.COLUMNS, 1) | {"model": "wide", "train_limit": 5.5, "prompt_tokens": 3000}
    seconds = {"whole": 6, "shared": 2, "shared-2": 3, "shared-micro-2": 2.5}
    rows = [
        {**row, "completion_tokens": completion, "way": way, **{f"{phase}_seconds": s for phase in worth.PHASES}}
        for completion in (100, 1000)
        for way, s in seconds.items()
    ]
    write_csv(tmp_path / "worth.csv", worth.COLUMNS, rows)
    figure = worth_chart.chart(read_worth(tmp_path))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    step = "3.00 x together\n2.00 x two a pass\n2.40 x two a micro-batch"
    train = step + "\nlimit 5.50 x"
    assert texts == [train, train, step, step]

    cells = "5.50 x | 3.00 x | 2.00 x | 2.40 x | 3.00 x | 2.00 x | 2.40 x |"
    assert f"| wide | 3,000 | 100 | {cells}" in worth_table(tmp_path)

    def draw():
        return worth_chart.main([str(tmp_path), str(tmp_path / "worth.png")])

    assert run_cli(draw) == 0 and (tmp_path / "worth.png").stat().st_size > 10_000
    write_csv(tmp_path / "worth.csv", worth.COLUMNS, [row for row in rows if row["way"] != "whole"])
    assert run_cli(draw) == 2 and "lacks 'whole'" in capsys.readouterr().err
    write_csv(tmp_path / "worth.csv", worth.COLUMNS, [{**rows[0], "train_seconds": ""}])
    assert run_cli(draw) == 2 and "line 2, train_seconds" in capsys.readouterr().err


def test_the_table_of_generation_shows_medians_and_who_is_faster(tmp_path):
    row = dict.fromkeys(decoding.COLUMNS, 1) | {
        "model": "wide",
        "prompt_tokens": 8000,
        "completion_tokens": 64,
        "k": 32,
    }
    rows = [
        {**row, "way": way, "repeat": repeat, "generate_seconds": seconds + repeat / 2}
        for way, seconds in (("whole", 8.5), ("shared", 2.5))
        for repeat in range(3)
    ]
    write_csv(tmp_path / "decoding.csv", decoding.COLUMNS, rows)
    assert "| wide | 8,000 | 64 | 32 | 9.00 | 3.00 | 3.00 x |" in decoding_table(tmp_path)
    assert "median of 3 alternating repeats" in decoding_table(tmp_path)
