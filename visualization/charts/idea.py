"""The idea in one picture: whole rows on the left, the prompt once on the right, and what each costs."""

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style
from visualization.results import BENCH, GIB, IN_SHORT, MARK, NOTE, Results, seconds

PROMPT, COMPLETION = "#9DB4C8", "#D55E00"
WIDTH = 0.7  # of the panel, for its longest bar; text goes behind it


def idea(results: Results) -> Figure | None:
    """TRL with logits of completions only, as on a GPU, beside prefix sharing: the tokens of a pass, drawn to scale,
    and peak and seconds of a whole step. None unless both arms finished at k = 8 of the scale `bench`."""
    arms = {next(iter(IN_SHORT)): "TRL: whole rows, logits of completions only", list(IN_SHORT)[-1]: "Prefix sharing"}
    results = results.only(arms, 8)
    if not set(arms) <= set(results.own[(results.own.scale == BENCH) & (results.own.status == "ok")].arm):
        return None
    cells = results.cells.droplevel("k").loc[list(arms)]
    k, prompt, completion = int(cells.k.iloc[0]), int(cells.fed.iloc[0]), int(cells.completion_tokens.iloc[0])
    tokens = (k * (prompt + completion), prompt + k * completion)
    took = [seconds(*row, 1) for row in cells[["step", "step_low", "step_high"]].to_numpy()]
    small_print = ["Medians. " + results.describe()]
    small_print += [NOTE] if MARK in "".join(took) else []
    handles = [
        Patch(color=PROMPT, label=f"prompt: {prompt:,} tokens"),
        Patch(color=COMPLETION, label=f"completion: {completion:,} tokens, {k} of them"),
    ]
    title = f"Today the prompt is computed {k} times; here it is computed once"
    figure = style.new_figure(9.6, 3.3, title, small_print, handles)
    panels = figure.subplots(2, 2, height_ratios=(1.7, 1))
    for column, (arm, name) in enumerate(arms.items()):
        cell = cells.loc[arm]
        draw_tokens(panels[0][column], name, prompt, completion, [(k - 1) / 2] if column else range(k), k)
        peak = f"{cell.above_bytes / GIB:.2f} GiB at the peak, above the start"
        costs = [
            (tokens[column], max(tokens), f"{tokens[column]:,} tokens through the model"),
            (cell.above_bytes, cells.above_bytes.max(), peak),
            (cell.step, cells.step.max(), f"{took[column]} seconds a step"),
        ]
        draw_costs(panels[1][column], cell, costs)
    return figure


def draw_tokens(axes: Axes, title: str, prompt: int, completion: int, prompts: Iterable[float], k: int) -> None:
    """k completions, one below the other, behind prompts at those heights."""
    axes.barh(prompts, prompt, height=0.7, color=PROMPT)
    axes.barh(range(k), completion, left=prompt, height=0.7, color=COMPLETION)
    axes.set_xlim(0, (prompt + completion) / (WIDTH + 0.22))
    axes.set_ylim(k - 0.4, -0.6)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.axis("off")


def draw_costs(axes: Axes, cell: pd.Series, costs: list[tuple[float, float, str]]) -> None:
    """A bar for each cost, as long as it is beside the larger of both ways, and its text behind it."""
    for place, (value, most, text) in enumerate(costs):
        axes.barh(place, WIDTH * value / most, height=0.62, color=style.colour(cell.arm))
        axes.text(WIDTH * value / most + 0.015, place, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.16)
    axes.set_ylim(len(costs) - 0.5, -0.5)
    axes.axis("off")
