"""The chart that a first reader sees: TRL as it is, in two cheaper ways, and with prefix sharing."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from visualization import style
from visualization.charts.frontier import draw_points
from visualization.runs import IN_SHORT, Run, describe, footnotes, in_short


def readme(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the seconds of a step at k = 8. None unless all its arms finished."""
    table = in_short(runs)
    if not all(cell and cell.values("step_seconds_median") and cell.values("above_start_bytes") for cell in table):
        return None
    mine = [run for cell in table for run in cell.runs]
    title = f"One training step with {table[0].k} completions a prompt: memory and time"
    figure = style.new_figure(9.6, 4.2, title, [describe(mine), *footnotes(mine)])
    draw_points(figure.add_subplot(), table, {cell.arm: IN_SHORT[cell.arm] + cell.mark for cell in table})
    return figure
