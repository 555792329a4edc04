"""What a trainer costs in memory and in time, side by side: charts and a table of the bench."""

from collections.abc import Sequence
from statistics import median

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from visualization import style
from visualization.runs import GIB, Cell, Run, cells, in_order, markdown

REFERENCE = "stock"  # what a user of TRL has today
PHASES = ("generate", "score", "train")


def compared(runs: Sequence[Run]) -> list[Cell]:
    """The cells of the largest k that most arms were run at, in the order of the project's table."""
    table = cells(runs)
    k = max({cell.k for cell in table}, key=lambda k: (sum(cell.k == k for cell in table), k))
    return [cell for cell in table if cell.k == k]


def frontier(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the seconds of a step, one point an arm: down and left is better.

    None unless several arms ran at one k. Bars span the repeats. A failed arm is named in the note.
    """
    table = [cell for cell in compared(runs) if cell.values("step_seconds_median")]
    if len(table) < 2 or not all(cell.values("above_start_bytes") for cell in table):
        return None
    failed = [f"{cell.arm}: {cell.failure()}" for cell in compared(runs) if cell.failure()]
    note = "median, bars span the repeats" + (f"; not finished: {', '.join(failed)}" if failed else "")
    title = f"Memory and time of a step, at k = {table[0].k}"
    figure = style.new_figure(7.5, 4.6, title, runs, note)
    axes = figure.add_subplot()
    for number, cell in enumerate(table):
        seconds, peaks = cell.values("step_seconds_median"), [x / GIB for x in cell.values("above_start_bytes")]
        x, y = median(seconds), median(peaks)
        axes.errorbar(
            x,
            y,
            xerr=[[x - min(seconds)], [max(seconds) - x]],
            yerr=[[y - min(peaks)], [max(peaks) - y]],
            color=style.colour(cell.arm),
            marker=style.marker(cell.arm),
            markersize=9,
            capsize=3,
        )
        # Neighbors in the table are often neighbors here: their names go above and below
        axes.annotate(
            cell.arm,
            (x, y),
            xytext=(7, -14 if number % 2 else 7),
            textcoords="offset points",
            fontsize=9,
            color=style.colour(cell.arm),
            bbox=style.BEHIND_TEXT,
        )
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_xlabel("seconds per step")
    axes.set_ylabel("peak above the start level (GiB)")
    return figure


def peak_by_k(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the number of completions, one line an arm. None with fewer than three k."""
    if len({run.k for run in runs}) < 3:
        return None
    failed = any(not cell.finished for cell in cells(runs))
    note = "median over repeats" + ("; a cross at the budget: out of memory" if failed else "")
    figure = style.new_figure(7.5, 4.6, "Peak memory as the number of completions grows", runs, note)
    axes = figure.add_subplot()
    budget = style.draw_budget(axes, runs, GIB) if failed else None
    for arm in in_order(run.arm for run in runs):
        mine = sorted((cell for cell in cells(runs) if cell.arm == arm), key=lambda cell: cell.k)
        done = [cell for cell in mine if cell.values("above_start_bytes")]
        axes.plot(
            [cell.k for cell in done],
            [cell.median("above_start_bytes") / GIB for cell in done],
            label=arm,
            color=style.colour(arm),
            linestyle=style.line_style(arm),
            marker=style.marker(arm),
        )
        for cell in mine:
            if not cell.finished and budget:
                axes.plot(cell.k, budget, color=style.colour(arm), marker="x", markersize=10, linestyle="none")
    ks = sorted({run.k for run in runs})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("completions per prompt, k")
    axes.set_ylabel("peak above the start level (GiB)")
    axes.legend(loc="best", fontsize=8.5)
    return figure


def phase_seconds(cell: Cell, phase: str) -> float | None:
    """Median over the runs of the seconds a step spends in that phase, None where it is not marked."""
    found = []
    for run in cell.finished:
        if (seconds := seconds_a_step(run.phases, phase)) is not None:
            found.append(seconds)
    return median(found) if found else None


def seconds_a_step(phases: pd.DataFrame, phase: str) -> float | None:
    """Seconds that a step spends in that phase, on average, None where it is not marked."""
    rows = phases[(phases["phase"] == phase) & (phases["step"] > 0)]
    return (rows["end"] - rows["start"]).sum() / rows["step"].nunique() if len(rows) else None


def phases_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm: seconds of each phase and of the step, how many times faster than `stock`, and the peak."""
    table = compared(runs)
    reference = next((cell for cell in table if cell.arm == REFERENCE), None)
    first = table[0].runs[0]
    k, prompt, completion = table[0].k, first.prompt_tokens_fed_mean, first.completion_tokens
    ratio = f"{k * (prompt + completion) / (prompt + k * completion):.2f}" if prompt and completion else "unknown"

    def show(cell: Cell, value: float | None, theirs: float | None) -> str:
        if value is None:
            return cell.failure() or "not marked"
        return f"{value:.1f}" + (f" ({theirs / value:.1f} x)" if theirs and cell is not reference else "")

    rows = []
    for cell in table:
        row = [f"`{cell.arm}`"]
        for phase in PHASES:
            row.append(show(cell, phase_seconds(cell, phase), reference and phase_seconds(reference, phase)))
        row.append(
            show(cell, cell.median("step_seconds_median"), reference and reference.median("step_seconds_median"))
        )
        above, theirs = cell.median("above_start_bytes"), reference and reference.median("above_start_bytes")
        row.append(
            cell.failure()
            if above is None
            else f"{above / GIB:.2f}" + (f" (1/{theirs / above:.1f})" if theirs and cell is not reference else "")
        )
        rows.append(row)
    repeats = min(len(cell.runs) for cell in table)
    return [
        f"Seconds at k = {k}, median of {repeats} runs, and how many times faster than `{REFERENCE}`. The token "
        f"ratio is {ratio}:",
        "",
        *markdown(
            ["arm", "generate", "score (old and reference)", "train", "whole step", "peak above start, GiB"], rows
        ),
    ]
