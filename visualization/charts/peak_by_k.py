"""How peak memory grows with the number of completions: one line an arm."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from visualization import style
from visualization.runs import GIB, Run, cells, in_order


def peak_by_k(runs: Sequence[Run]) -> Figure | None:
    """Peak above the start level against the number of completions, one line an arm. None with fewer than three k.

    A cell where every run went out of memory is a cross at the budget; each cell without a peak is named below."""
    if len({run.k for run in runs}) < 3:
        return None
    table = cells(runs)
    missing = [cell for cell in table if not cell.finished]
    note = "median over repeats"
    if missing:
        note += "; no peak, and a cross at the budget where out of memory: "
        note += ", ".join(f"{cell.arm} k={cell.k} ({cell.failure()})" for cell in missing)
    looks = {arm: {**style.line(arm), "marker": style.marker(arm)} for arm in in_order(run.arm for run in runs)}
    marks = {cell.arm: cell.mark for cell in table if cell.mark}
    handles = [Line2D([], [], label=arm + marks.get(arm, ""), **look) for arm, look in looks.items()]
    title = "Peak memory as the number of completions grows"
    figure = style.new_figure(7.5, 4.6, title, style.footer(runs, note), handles)
    axes = figure.add_subplot()
    out_of_memory = [cell for cell in missing if cell.count("oom") == len(cell.runs)]
    budget = style.draw_budget(axes, runs, GIB) if out_of_memory else None
    for arm, look in looks.items():
        done = [cell for cell in table if cell.arm == arm and cell.values("above_start_bytes")]
        peaks = [cell.above / GIB for cell in done]
        axes.plot([cell.k for cell in done], peaks, label=arm, **look)
    for number, cell in enumerate(out_of_memory if budget else []):
        # Several arms run out at one k: each later cross is smaller, so that all are seen
        size = max(6, 15 - 4 * sum(cell.k == other.k for other in out_of_memory[:number]))
        cross = {"marker": "x", "markersize": size, "markeredgewidth": 2.5, "linestyle": "none"}
        axes.plot(cell.k, budget, color=style.colour(cell.arm), **cross)
    ks = sorted({run.k for run in runs})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("completions per prompt, k")
    axes.set_ylabel("peak above the start level (GiB)")
    return figure
