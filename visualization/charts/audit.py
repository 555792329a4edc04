"""The audit: tokens really fed against the peak, ours beside the published points."""

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from visualization import style
from visualization.published_2025 import PUBLISHED
from visualization.results import GIB, MEASURES, Results, in_order

ON_ONE_LINE = ("classic-baseline", "classic-string", "classic-string-exact")
THOUSANDS = {"classic-baseline": 3.1, "classic-string": 1.124}  # tokens a sequence: 3,000 or 1,024 fed + 100 new
COLUMNS = ["arm", "k", "thousands", "above"]  # thousands of tokens in the batch, GiB above the start level
POINTS_2025 = PUBLISHED.assign(thousands=PUBLISHED.k * PUBLISHED.arm.map(THOUSANDS))[COLUMNS].dropna()


def fit(points: pd.DataFrame) -> tuple[float, float, float]:
    """Slope, intercept and R squared of the least-squares line through them."""
    slope, intercept = np.polyfit(points.thousands, points.above, 1)
    return slope, intercept, np.corrcoef(points.thousands, points.above)[0, 1] ** 2


def audit(results: Results) -> Figure | None:
    """Medians per arm and k, with the line through the baseline and both string arms; the published points beside it.
    None where none of these finished."""
    table = results.cells
    points = table.assign(thousands=table.tokens / 1000, above=table.above_bytes / GIB)[COLUMNS].dropna()
    if not points.arm.isin(ON_ONE_LINE).any():
        return None
    failed = style.without_peak(table)
    note = f"no peak, so no point: {failed}" if failed else ""
    arms = in_order([*points.arm, *POINTS_2025.arm])
    markers = dict(zip(sorted({*points.k, *POINTS_2025.k}), cycle(style.K_MARKERS), strict=False))
    dot = {"linestyle": "", "marker": "o", "markersize": 8}
    handles = [Line2D([], [], color=style.colour(arm), label=arm, **dot) for arm in arms]
    empty = {"markerfacecolor": "white", "color": "black", "linestyle": "", "markersize": 7}
    handles += [Line2D([], [], marker=mark, label=f"k = {k}", **empty) for k, mark in markers.items()]
    title = "Audit: memory follows the tokens that were really fed"
    figure = style.new_figure(11, 4.6, title, style.footer(results, note, arms), handles, 5)
    ours, published = figure.subplots(1, 2)
    scatter(ours, points, markers, f"measured here: {MEASURES[results.measure]}")
    scatter(published, POINTS_2025, markers, "published 2025, RTX 5090, device-wide used")
    return figure


def scatter(axes: Axes, points: pd.DataFrame, markers: dict[int, str], title: str) -> None:
    on_line = points[points.arm.isin(ON_ONE_LINE)]
    right = points.thousands.max() * 1.12
    if on_line.thousands.nunique() > 1:
        slope, intercept, r_squared = fit(on_line)
        ends = [intercept, intercept + slope * right]
        axes.plot([0, right], ends, color="#404040", linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        through = ",\n".join(in_order(on_line.arm))
        words = f"one line through\n{through}:\n{slope:.3g} GiB per 1,000 tokens,\nR² = {r_squared:.4f}"
        axes.text(0.02, 0.98, words, transform=axes.transAxes, va="top", fontsize=8.5, bbox=style.BEHIND_TEXT)
    for point in points.itertuples():
        # The baseline's marks are larger, so that they show around those of an arm on the same place.
        size = 13 if point.arm == ON_ONE_LINE[0] else 8
        look = {"color": style.colour(point.arm), "markeredgecolor": "black", "markeredgewidth": 0.7, "linestyle": ""}
        axes.plot(point.thousands, point.above, marker=markers[point.k], markersize=size, **look)
    axes.set_title(title)
    axes.set_xlim(0, right)
    axes.set_ylim(0, points.above.max() * 1.29)
    axes.set_xlabel("tokens in the batch, fed + generated (thousands)")
    axes.set_ylabel("peak above the start level (GiB)")
