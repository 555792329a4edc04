"""The idea in one picture: whole rows on the left, the prompt once on the right, and what each costs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import seconds, style
from visualization.runs import GIB, Cell, Run, describe, footnotes, in_short

PROMPT, COMPLETION = "#9DB4C8", "#D55E00"
WIDTH = 0.7  # of the panel, for its longest bar; text goes behind it


def idea(runs: Sequence[Run]) -> Figure | None:
    """TRL with logits of completions only, as on a GPU, beside prefix sharing: the tokens of a pass, drawn to scale,
    and peak and seconds of a whole step. None unless both arms finished at that k."""
    rows, _, shared = in_short(runs)
    ways = (rows, shared)
    if not all(cell and cell.seconds().values and cell.values("above_start_bytes") for cell in ways):
        return None
    prompt, completion = (int(rows.first(name)) for name in ("prompt_tokens_fed_mean", "completion_tokens"))
    tokens = (rows.k * (prompt + completion), prompt + rows.k * completion)
    peaks = [cell.above / GIB for cell in ways]
    took = [cell.seconds() for cell in ways]
    costs = [
        [(count, f"{count:,} tokens through the model") for count in tokens],
        [
            (peak, f"{peak:.2f}{cell.mark} GiB at the peak, above the start")
            for peak, cell in zip(peaks, ways, strict=True)
        ],
        [(each.median, f"{each.shown(1)} seconds a step") for each in took],
    ]
    mine = [run for cell in ways for run in cell.runs]
    small_print = [f"Medians. {describe(mine)}", *footnotes(mine), *seconds.note(each.shown(1) for each in took)]
    handles = [
        Patch(color=PROMPT, label=f"prompt: {prompt:,} tokens"),
        Patch(color=COMPLETION, label=f"completion: {completion:,} tokens, {rows.k} of them"),
    ]
    title = f"Today the prompt is computed {rows.k} times; here it is computed once"
    figure = style.new_figure(9.6, 3.3, title, small_print, handles)
    panels = figure.subplots(2, 2, height_ratios=(1.7, 1))
    for column, (cell, name) in enumerate(
        zip(ways, ("TRL: whole rows, logits of completions only", "Prefix sharing"), strict=True)
    ):
        above, below = panels[0][column], panels[1][column]
        draw_tokens(above, name, prompt, completion, [(cell.k - 1) / 2] if column else range(cell.k), cell.k)
        draw_costs(below, cell, [(*cost[column], max(value for value, _ in cost)) for cost in costs])
    return figure


def draw_tokens(axes: Axes, title: str, prompt: int, completion: int, prompts: Sequence[float], k: int) -> None:
    """k completions, one below the other, behind prompts at those heights."""
    axes.barh(prompts, prompt, height=0.7, color=PROMPT)
    axes.barh(range(k), completion, left=prompt, height=0.7, color=COMPLETION)
    axes.set_xlim(0, (prompt + completion) / (WIDTH + 0.22))
    axes.set_ylim(k - 0.4, -0.6)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.axis("off")


def draw_costs(axes: Axes, cell: Cell, costs: Sequence[tuple[float, str, float]]) -> None:
    """A bar for each cost, as long as it is beside the larger of both ways, and its text behind it."""
    for place, (value, text, most) in enumerate(costs):
        axes.barh(place, WIDTH * value / most, height=0.62, color=style.colour(cell.arm))
        axes.text(WIDTH * value / most + 0.015, place, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.16)
    axes.set_ylim(len(costs) - 0.5, -0.5)
    axes.axis("off")
