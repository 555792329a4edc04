"""Predicted beside published peaks of GPUs: one point a training, a colour a card.

python -m visualization.charts.published_gpus results/published OUT.png
"""

from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from visualization import style
from visualization.results import GIB
from visualization.tables.of_plans import read_peaks, within

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MARKERS = {"allocated": "o", "after a step": "s", "allocated or reserved": "^"}


def chart(folder: Path) -> Figure:
    """Measured over predicted, by what is predicted; the band is what is held. Rows that are not held are left out."""
    rows = read_peaks(folder)
    rows = rows[rows.metric.isin(MARKERS) & (rows.not_held == "")]
    small_print = [
        "Measured: published figures, with links in results/published/gpu_peaks.csv. Predicted: this planner, without "
        "a GPU, for the LM head that ran.",
        "Trainings of untouched TRL, transformers and torchtune: none with prefix sharing or activation offloading. "
        f"{within(rows)}.",
    ]
    figure = style.new_figure(8, 3.4, "Published peaks of GPUs over predicted ones", small_print)
    axes = figure.subplots()
    axes.axhspan(0.985, 1.015, color="#e8f1e8", zorder=0)
    axes.axhline(1, color="black", linewidth=0.8)
    for colour, (card, mine) in zip(cycle(COLOURS), rows.groupby("card", sort=False), strict=False):
        for metric, points in mine.groupby("metric", sort=False):
            axes.plot(
                points.predicted_bytes / GIB, points.ratio, MARKERS[metric], color=colour, markersize=6, alpha=0.75,
                label=f"{card}, {metric}", linestyle="",
            )  # fmt: skip
    axes.set_xscale("log")
    ticks = [2, 3, 5, 10, 20, 40, 64]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("predicted, GiB")
    axes.set_ylabel("measured / predicted")
    axes.set_ylim(0.94, 1.06)
    axes.legend(loc="lower left", fontsize=7.5, ncols=2)
    return figure


if __name__ == "__main__":
    style.draw_one(__doc__, chart)
