"""The chart that a first reader sees: TRL as it is, in two cheaper ways, and with prefix sharing."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from visualization import seconds, style
from visualization.charts.frontier import draw_points
from visualization.runs import IN_SHORT, Run, describe, footnotes, in_short


def readme(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the seconds of a step at k = 8. None unless all its arms finished."""
    table = in_short(runs)
    if not all(cell and cell.seconds().values and cell.values("above_start_bytes") for cell in table):
        return None
    mine = [run for cell in table for run in cell.runs]
    title = f"One training step with {table[0].k} completions a prompt: memory and time"
    names = {cell.arm: IN_SHORT[cell.arm] + cell.mark + cell.seconds().mark for cell in table}
    small_print = [describe(mine), *footnotes(mine), *seconds.note(names.values())]
    figure = style.new_figure(9.6, 4.2, title, small_print)
    draw_points(figure.add_subplot(), table, names)
    return figure
