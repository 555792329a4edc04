"""How peak memory grows with the number of completions: one line an arm."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from visualization import style
from visualization.results import GIB, Results


def peak_by_k(results: Results) -> Figure | None:
    """Peak above the start level against the number of completions, one line an arm. None with fewer than three k.

    A cell where every run went out of memory is a cross at the budget; each cell without a peak is named below."""
    table = results.cells
    ks = sorted(set(table.k))
    if len(ks) < 3:
        return None
    missing = table[table.ok == 0].reset_index(drop=True)
    note = "median over repeats"
    if len(missing):
        note += f"; no peak, and a cross at the budget where out of memory: {style.without_peak(table)}"
    looks = {arm: {**style.line(arm), "marker": style.marker(arm)} for arm in results.arms}
    handles = [Line2D([], [], label=arm, **look) for arm, look in looks.items()]
    title = "Peak memory as the number of completions grows"
    figure = style.new_figure(7.5, 4.6, title, style.footer(results, note), handles)
    axes = figure.add_subplot()
    for arm, look in looks.items():
        done = table[(table.arm == arm) & (table.ok > 0)]
        axes.plot(done.k, done.above_bytes / GIB, label=arm, **look)
    out_of_memory = missing[missing.oom == missing.runs]
    if len(out_of_memory) and (budget := style.draw_budget(axes, results)):
        for cell, at_same_k in zip(out_of_memory.itertuples(), out_of_memory.groupby("k").cumcount(), strict=True):
            # Several arms run out at one k: each later cross is smaller, so that all are seen
            cross = {"marker": "x", "markersize": max(6, 15 - 4 * at_same_k), "markeredgewidth": 2.5}
            axes.plot(cell.k, budget, color=style.colour(cell.arm), linestyle="none", **cross)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("completions per prompt, k")
    axes.set_ylabel("peak above the start level (GiB)")
    return figure
