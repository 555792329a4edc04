"""The audit: tokens really fed against the peak, ours beside the published points."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from visualization import style
from visualization.legacy import PUBLISHED
from visualization.runs import GIB, Run, alone, cells, in_order

ON_ONE_LINE = ("classic-baseline", "classic-string", "classic-string-exact")
THOUSANDS = {"classic-baseline": 3.1, "classic-string": 1.124}  # tokens a sequence: 3,000 or 1,024 fed + 100 new
# arm, k, thousands of tokens in the batch, GiB above the start level
POINTS_2025 = tuple(
    (arm, k, k * THOUSANDS[arm], cell.above_gib) for (arm, k), cell in PUBLISHED.items() if cell.above_gib
)


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float] | None:
    """Slope, intercept and R squared of the least-squares line, None with fewer than two different x."""
    if len(set(x)) < 2:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    spread = np.sum((np.asarray(y) - np.mean(y)) ** 2)
    rest = np.sum((np.asarray(y) - slope * np.asarray(x) - intercept) ** 2)
    return float(slope), float(intercept), float(1 - rest / spread) if spread else 1.0


def audit(runs: Sequence[Run]) -> Figure | None:
    """Thousands of tokens in the batch against the peak above start (GiB), median per arm and k, with the line through
    the baseline and both string arms; the published points beside it. None where no run of these says what it was fed.

    A k of one arm alone is left out: it would stretch the axes without another arm to hold it against."""
    single = alone(runs)
    table = [cell for cell in cells(runs) if cell.k not in single]
    points = [
        (cell.arm, cell.k, cell.median("tokens_in_batch") / 1000, cell.above / GIB)
        for cell in table
        if None not in (cell.median("tokens_in_batch"), cell.above)
    ]
    if not any(arm in ON_ONE_LINE for arm, *_ in points):
        return None
    failed = ", ".join(f"{cell.arm} k={cell.k} ({cell.failure()})" for cell in table if not cell.finished)
    left_out = ", ".join(f"{arm} k={k}" for k, arm in single.items())
    told = {"no peak, so no point": failed, "not drawn": left_out}
    note = "; ".join(f"{what}: {which}" for what, which in told.items() if which)
    arms = in_order(arm for arm, *_ in (*points, *POINTS_2025))
    ks = sorted({k for _, k, *_ in (*points, *POINTS_2025)})
    markers = {k: style.K_MARKERS[place % len(style.K_MARKERS)] for place, k in enumerate(ks)}
    dot = {"linestyle": "", "marker": "o", "markersize": 8}
    handles = [Line2D([], [], color=style.colour(arm), label=arm, **dot) for arm in arms]
    empty = {"markerfacecolor": "white", "color": "black", "linestyle": "", "markersize": 7}
    handles += [Line2D([], [], marker=mark, label=f"k = {k}", **empty) for k, mark in markers.items()]
    title = "Audit: memory follows the tokens that were really fed"
    figure = style.new_figure(11, 4.6, title, style.footer(runs, note, arms), handles, 5)
    ours, published = figure.subplots(1, 2)
    _scatter(ours, points, markers, f"measured here: {runs[0].measure.label}")
    _scatter(published, POINTS_2025, markers, "published 2025, RTX 5090, device-wide used")
    return figure


def _scatter(axes: Axes, points: Sequence[tuple[str, int, float, float]], markers: dict[int, str], title: str) -> None:
    on_line = [point for point in points if point[0] in ON_ONE_LINE]
    line = fit([point[2] for point in on_line], [point[3] for point in on_line])
    right = max(point[2] for point in points) * 1.12
    top = max(point[3] for point in points) * 1.12
    if line:
        slope, intercept, r_squared = line
        ends = [intercept, intercept + slope * right]
        axes.plot([0, right], ends, color="#404040", linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        through = ",\n".join(in_order(point[0] for point in on_line))
        words = f"one line through\n{through}:\n{slope:.3g} GiB per 1,000 tokens,\nR² = {r_squared:.4f}"
        axes.text(0.02, 0.98, words, transform=axes.transAxes, va="top", fontsize=8.5, bbox=style.BEHIND_TEXT)
    for arm, k, tokens, peak in points:
        # The baseline's marks are larger, so that they show around those of an arm on the same place.
        size = 13 if arm == ON_ONE_LINE[0] else 8
        look = {"color": style.colour(arm), "markeredgecolor": "black", "markeredgewidth": 0.7, "linestyle": ""}
        axes.plot(tokens, peak, marker=markers[k], markersize=size, **look)
    axes.set_title(title)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top * 1.15)
    axes.set_xlabel("tokens in the batch, fed + generated (thousands)")
    axes.set_ylabel("peak above the start level (GiB)")
