"""Bars of peaks: every arm at every k."""

import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style
from visualization.runs import BASELINE, GIB, Cell, Run, alone, cells, in_order

WIDTH = 0.9  # of a bar


def peak_comparison(runs: Sequence[Run]) -> Figure:
    """Bars per k and arm: median peak in GiB with its range, the start level as a grey base, failed cells named.

    A percentage is the change of the peak above the start level against `BASELINE` at the same k. An arm that was not
    run at a k says so in its place, except where one arm alone was run: that k takes the room of one bar.
    """
    arms = in_order(run.arm for run in runs)
    ks = sorted({run.k for run in runs})
    table = {(cell.arm, cell.k): cell for cell in cells(runs)}
    # 2025 files hold device-wide figures and no known end of a run: nothing to derive a claim from
    compared = [cell for cell in table.values() if cell.arm != BASELINE and not cell.count("unknown")]
    changes = {(cell.arm, cell.k): cell.change(table.get((BASELINE, cell.k))) for cell in compared}
    percents = any(change is not None for change in changes.values())
    measure = next((run.measure.label for run in runs if run.peak_bytes is not None), runs[0].measure.label)
    note = f"percent: peak above the start level against {BASELINE} at the same k" if percents else ""
    single = alone(runs)
    handles = [Patch(**style.bar(arm) | {"linewidth": None}, label=arm) for arm in arms]
    start = "level of the first sample" if runs[0].status == "unknown" else "level before the first step"
    handles.append(Patch(facecolor=style.START_COLOUR, label=start))
    places = [[single[k]] if k in single else arms for k in ks]
    starts = [sum(len(group) + 1 for group in places[:number]) for number in range(len(ks))]  # in bars, one between
    width = max(7.5, 1.2 + 0.45 * (starts[-1] + len(places[-1])))
    figure = style.new_figure(width, 4.6, f"Peak memory: {measure}", style.footer(runs, note), handles)
    axes = figure.add_subplot()
    budget = style.draw_budget(axes, runs, GIB)
    highest = max([budget or 0, *(run.peak_bytes / GIB for run in runs if run.peak_bytes)]) or 1
    axes.set_ylim(0, highest * 1.18)
    for k, start, group in zip(ks, starts, places, strict=True):
        for x, arm in enumerate(group, start):
            cell = table.get((arm, k))
            if cell is None:
                axes.text(x, highest * 0.015, "not run", rotation=90, ha="center", va="bottom", color="#707070")
            elif cell.finished:
                _draw_peak(axes, x, cell, changes.get((arm, k)))
            else:
                _draw_failure(axes, x, cell, budget or highest)
    middles = [start + (len(group) - 1) / 2 for start, group in zip(starts, places, strict=True)]
    axes.set_xticks(middles, [f"k = {k}" for k in ks], fontsize=10)
    axes.set_xlabel("completions per prompt")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-1, starts[-1] + len(places[-1]))
    axes.set_ylabel("peak memory (GiB)")
    return figure


def _draw_peak(axes: Axes, x: float, cell: Cell, change: float | None) -> None:
    peaks = [peak / GIB for peak in cell.values("peak_bytes")]
    peak, start = cell.median("peak_bytes") / GIB, (cell.median("start_bytes") or 0) / GIB
    axes.bar(x, peak - start, WIDTH, bottom=start, **style.bar(cell.arm))
    axes.bar(x, start, WIDTH, color=style.START_COLOUR, linewidth=0)
    if len(peaks) > 1:
        axes.errorbar(x, peak, yerr=[[peak - min(peaks)], [max(peaks) - peak]], color="black", capsize=3, linewidth=1)
    label = f"{peak:.2f}" + ("*" if cell.count("unknown") else "") + cell.mark
    if change is not None:
        label += f"\n{round(change * 100):+d} %".replace("-", "\N{MINUS SIGN}")
    if cell.failure():
        label = re.sub(r", | (?=[A-Za-z]+(?:,|$))", "\n", cell.failure()) + "\n" + label
    look = {"ha": "center", "va": "bottom", "fontsize": 7.5, "linespacing": 1.1, "bbox": style.BEHIND_TEXT}
    style.write_at(axes, label, (x, max(peaks)), 0, 3, **look)


def _draw_failure(axes: Axes, x: float, cell: Cell, height: float) -> None:
    """A cell without any finished run is a named, hatched bar up to the budget: never a number."""
    axes.bar(x, height, WIDTH, facecolor="white", hatch="//////", edgecolor="#9a9a9a", linewidth=1.2, linestyle="--")
    look = {"rotation": 90, "ha": "center", "va": "center", "fontweight": "bold", "fontsize": 10}
    axes.text(x, height / 2, cell.failure(), bbox={"facecolor": "white", "edgecolor": "none", "pad": 2}, **look)
