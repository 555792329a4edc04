"""Bars of peaks: every arm at every k."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style
from visualization.results import BASELINE, GIB, LEAST, MEASURES, Results, what_it_is

WIDTH = 0.9  # of a bar


def peak_comparison(results: Results) -> Figure:
    """Bars per k and arm: median peak in GiB with its range, the start level as a grey base, failed cells named.

    A percentage is the change of the peak above the start level against `BASELINE` at the same k."""
    table, arms = results.cells, results.arms
    base = table.above_bytes[table.arm == BASELINE].droplevel("arm")
    base = table.k.map(base[base >= LEAST])
    changes = (table.above_bytes / base - 1).where(table.arm != BASELINE)
    ks = sorted(set(table.k))
    note = f"percent: peak above the start level against {what_it_is(BASELINE)} at the same k"
    small_print = [results.describe(), *([note] if changes.notna().any() else []), *results.footnotes()]
    handles = [Patch(**style.bar(arm) | {"linewidth": None}, label=what_it_is(arm)) for arm in arms]
    handles.append(Patch(facecolor=style.START_COLOUR, label="level before the first step"))
    title = f"Peak memory: {MEASURES[results.measure]}"
    figure = style.new_figure(
        max(7.5, 0.75 + 0.45 * len(ks) * (len(arms) + 1)), 4.6, title, small_print, handles, columns=2
    )
    axes = figure.add_subplot()
    budget = style.draw_budget(axes, results)
    highest = max(budget or 0, table.peak_bytes_high.max() / GIB if table.ok.any() else 0) or 1
    axes.set_ylim(0, highest * 1.18)
    for place, k in enumerate(ks):
        for x, arm in enumerate(arms, place * (len(arms) + 1)):
            if (arm, k) not in table.index:
                axes.text(x, highest * 0.015, "not run", rotation=90, ha="center", va="bottom", color="#707070")
            elif table.ok[arm, k]:
                _draw_peak(axes, x, table.loc[arm, k], changes[arm, k])
            else:
                _draw_failure(axes, x, table.failure[arm, k], budget or highest)
    middles = [place * (len(arms) + 1) + (len(arms) - 1) / 2 for place in range(len(ks))]
    axes.set_xticks(middles, [f"k = {k}" for k in ks], fontsize=10)
    axes.set_xlabel("completions per prompt")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-1, len(ks) * (len(arms) + 1) - 1)
    axes.set_ylabel("peak memory (GiB)")
    return figure


def _draw_peak(axes: Axes, x: float, cell: pd.Series, change: float) -> None:
    peak, low, high, start = (
        cell[name] / GIB for name in ("peak_bytes", "peak_bytes_low", "peak_bytes_high", "start_bytes")
    )
    axes.bar(x, peak - start, WIDTH, bottom=start, **style.bar(cell.arm))
    axes.bar(x, start, WIDTH, color=style.START_COLOUR, linewidth=0)
    if cell.ok > 1:
        axes.errorbar(x, peak, yerr=[[peak - low], [high - peak]], color="black", capsize=3, linewidth=1)
    label = f"{peak:.2f}" + ("" if pd.isna(change) else f"\n{round(change * 100):+d} %".replace("-", "\N{MINUS SIGN}"))
    if cell.failure:
        label = cell.failure.replace("out of memory", "OOM").replace(", ", "\n") + "\n" + label
    look = {"ha": "center", "va": "bottom", "fontsize": 7.5, "linespacing": 1.1, "bbox": style.BEHIND_TEXT}
    style.write_at(axes, label, (x, high), 0, 3, **look)


def _draw_failure(axes: Axes, x: float, failure: str, height: float) -> None:
    """A cell without any finished run is a named, hatched bar up to the budget: never a number."""
    axes.bar(x, height, WIDTH, facecolor="white", hatch="//////", edgecolor="#9a9a9a", linewidth=1.2, linestyle="--")
    look = {"rotation": 90, "ha": "center", "va": "center", "fontweight": "bold", "fontsize": 10}
    axes.text(x, height / 2, failure, bbox={"facecolor": "white", "edgecolor": "none", "pad": 2}, **look)
