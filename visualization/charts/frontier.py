"""What a trainer costs in memory and in time: one point an arm."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from visualization import seconds, style
from visualization.runs import GIB, Cell, Run, compared


def frontier(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the seconds of a step, one point an arm: down and left is better.

    None unless several arms ran at one k. Bars span the repeats. A failed arm is named in the note.
    """
    table = [cell for cell in compared(runs) if cell.seconds().values]
    if len(table) < 2 or not all(cell.values("above_start_bytes") for cell in table):
        return None
    failed = [f"{cell.arm}: {cell.failure()}" for cell in compared(runs) if cell.failure()]
    note = "median, bars span the repeats" + (f"; not finished: {', '.join(failed)}" if failed else "")
    title = f"Memory and time of a step, at k = {table[0].k}"
    names = {cell.arm: cell.arm + cell.mark + cell.seconds().mark for cell in table}
    figure = style.new_figure(7.5, 4.6, title, [*style.footer(runs, note), *seconds.note(names.values())])
    draw_points(figure.add_subplot(), table, names)
    return figure


def draw_points(axes: Axes, table: Sequence[Cell], names: Mapping[str, str]) -> None:
    """One point a cell with its name beside it: median, bars over the repeats. Axes start at nothing."""
    points = [(cell.seconds().median, median(cell.values("above_start_bytes"))) for cell in table]
    most = [max(values) for values in zip(*points, strict=True)]
    named: list[tuple[tuple[float, float], int]] = []  # points and how far above them their names stand
    for cell, point in zip(table, points, strict=True):
        took, peaks = cell.seconds().values, [x / GIB for x in cell.values("above_start_bytes")]
        x, y = point[0], point[1] / GIB
        near = [
            height
            for other, height in named
            if all(abs(a - b) < 0.05 * top for a, b, top in zip(point, other, most, strict=True))
        ]
        # Neighbors in the table are often neighbors here: their names go above and below
        heights = (7, -14, 19, 31) if len(named) % 2 == 0 else (-14, 7, 19, 31)
        named.append((point, next((height for height in heights if height not in near), heights[0])))
        axes.errorbar(
            x,
            y,
            xerr=[[x - min(took)], [max(took) - x]],
            yerr=[[y - min(peaks)], [max(peaks) - y]],
            color=style.colour(cell.arm),
            marker=style.marker(cell.arm),
            markersize=9,
            capsize=3,
        )
        axes.annotate(
            names[cell.arm],
            (x, y),
            xytext=(7, named[-1][1]),
            textcoords="offset points",
            fontsize=9,
            color=style.colour(cell.arm),
            bbox=style.BEHIND_TEXT,
        )
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_xlabel("seconds per step")
    axes.set_ylabel("peak above the start level (GiB)")
