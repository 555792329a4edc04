"""What sharing is worth: how many times faster than whole rows, over prompts and completions of many lengths.

python -m visualization.charts.worth results/<machine> OUT.png
"""

from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from visualization import style
from visualization.results import NOTE
from visualization.tables.of_bench import IN_SHORT, faster, in_words, read_bench, token_ratio
from visualization.tables.text import how_often, measured_on

MODELS = {"narrow": "narrow (8 layers of width 256)", "wide": "wide (2 layers of Qwen3-0.6B's width)"}
_LIGHT = ListedColormap(colormaps["YlGn"](range(0, 160)))  # black text can be read on all of it


def chart(folder: Path) -> Figure:
    """One panel a model for the training pass, and one for the whole step."""
    rows = read_bench(folder, "worth")
    models = [name for name in MODELS if name in set(rows.model)]
    small_print = [
        *([NOTE] if faster(rows, "step").isna().any(axis=None) else []),
        f"{measured_on(rows)} · float32 · {how_often(rows)}",
        "Against TRL's own whole rows with the LM head that scores only completions. A step is one generation, one "
        "scoring and one training pass. Token ratio: tokens of whole rows for each one with shared prompts.",
    ]
    figure = style.new_figure(
        10,
        3.2 * len(models),
        f"Times faster than whole rows, k = {rows.k.iloc[0]} completions a prompt",
        small_print,
    )
    axes = figure.subplots(len(models), 2, squeeze=False)
    for line, model in zip(axes, models, strict=True):
        mine = rows[rows.model == model]
        draw(line[0], faster(mine, "train"), mine.k.iloc[0], f"Training pass, {MODELS[model]}")
        draw(line[1], faster(mine, "step"), mine.k.iloc[0], f"Whole step, {MODELS[model]}")
    return figure


def draw(axes: Axes, table: pd.DataFrame, k: int, title: str) -> None:
    """One square a cell: prompts upwards, completions to the right."""
    plane = table.max(axis=1).droplevel("model").unstack("completion_tokens")
    axes.imshow(plane, origin="lower", aspect="auto", cmap=_LIGHT, norm=LogNorm(0.7, 16))
    measured = {(prompt, completion): row for (_, prompt, completion), row in table.iterrows()}
    for (y, prompt), (x, completion) in product(enumerate(plane.index), enumerate(plane.columns)):
        lines, row = ["not measured"], measured.get((prompt, completion))
        if row is not None:
            lines = [f"{in_words(row[way])} {name}" for way, name in IN_SHORT.items()]
            lines.append(f"token ratio {token_ratio(prompt, completion, k):.2f}")
        axes.annotate("\n".join(lines), (x, y), ha="center", va="center")
    axes.grid(visible=False)
    axes.set_xticks(range(len(plane.columns)), [f"{x:,.0f}" for x in plane.columns])
    axes.set_yticks(range(len(plane.index)), [f"{x:,.0f}" for x in plane.index])
    axes.set_xlabel("completion (tokens)")
    axes.set_ylabel("prompt (tokens)")
    axes.set_title(title)


if __name__ == "__main__":
    style.draw_one(__doc__, chart)
