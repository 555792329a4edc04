"""Memory over time, one panel per k: once with every peak kept, once smoothed and saying so."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from visualization import style
from visualization.runs import GIB, LOST, Run, by_trainer, cells

MAX_POINTS = 1200  # a panel is about 1,400 pixels wide
FAILED = ("oom", "error", "killed", "damaged")
OUTLINE = [withStroke(linewidth=2, foreground="white")]
Curve = Callable[[Run], tuple[np.ndarray, np.ndarray]]


def peak_preserving(samples: pd.DataFrame, phases: pd.DataFrame, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes to draw, at most `max_points` (4 or more), whose maximum is the recorded maximum exactly.

    `samples` has `t` and `bytes`; `phases` has `mark_t` and `mark_bytes`, high-water marks that a sampler can miss.
    Every bin of time-ordered points keeps its lowest and its highest one.
    """
    t = np.concatenate([samples["t"].to_numpy(float), phases["mark_t"].to_numpy(float)])
    y = np.concatenate([samples["bytes"].to_numpy(float), phases["mark_bytes"].to_numpy(float)])
    known = ~(np.isnan(t) | np.isnan(y))
    t, y = t[known], y[known]
    order = np.argsort(t, kind="stable")
    t, y = t[order], y[order]
    if len(t) <= max_points:
        return t, y
    keep = {0, len(t) - 1}
    for part in np.array_split(np.arange(len(t)), (max_points - 2) // 2):
        keep |= {part[np.argmin(y[part])], part[np.argmax(y[part])]}
    chosen = sorted(keep)
    return t[chosen], y[chosen]


def smoothed(samples: pd.DataFrame, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of a centred rolling mean over a twentieth of the samples, thinned to about `max_points`."""
    known = samples.dropna(subset=["t", "bytes"])
    mean = known["bytes"].rolling(max(5, len(known) // 20), center=True, min_periods=1).mean()
    every = max(1, -(-len(known) // max_points))
    return known["t"].to_numpy(float)[::every], mean.to_numpy(float)[::every]


def timeline_peak_preserving(runs: Sequence[Run]) -> Figure:
    """The timeline whose drawn maximum is each run's recorded peak."""
    title = "Memory over time (every recorded peak is drawn)"
    return _timeline(runs, title, lambda run: peak_preserving(run.samples, run.phases, MAX_POINTS))


def timeline_ultra_smooth(runs: Sequence[Run]) -> Figure:
    """The timeline as a rolling mean."""
    title = "Memory over time (smoothed: does not show true peaks)"
    return _timeline(runs, title, lambda run: smoothed(run.samples, MAX_POINTS))


def _timeline(runs: Sequence[Run], title: str, curve: Curve) -> Figure:
    ks = sorted({run.k for run in runs})
    columns = by_trainer(run.arm for run in runs)
    with_phases = any(len(run.phases) for run in runs)
    strip = 0.13 * max(map(len, columns)) + 0.1 if with_phases else 0.01
    note = "one run per arm and k: the first that finished, else the one that failed"
    note += "; the strips name each run's phases" if with_phases else ""
    handles = [Line2D([], [], **style.line(arm), linewidth=1.8, label=arm) for arms in columns for arm in arms]
    greys = style.PHASE_GREYS.items() if with_phases else ()
    edge = {"edgecolor": "#808080", "linewidth": 0.5}
    handles += [Patch(facecolor=grey, label=f"phase: {phase}", **edge) for phase, grey in greys]
    figure = style.new_figure(13, len(ks) * (2.6 + strip), title, style.footer(runs, note), handles, 5)
    figure.get_layout_engine().set(h_pad=0.02, hspace=0)
    grid = figure.subplots(2 * len(ks), len(columns), squeeze=False, height_ratios=[2.0, strip] * len(ks))
    for row, k in enumerate(ks):
        for column, panel, strips in zip(columns, grid[2 * row], grid[2 * row + 1], strict=True):
            mine = [run for run in runs if run.k == k and run.arm in column]
            _draw_panel(panel, strips, k, [representative(cell.runs) for cell in cells(mine)], curve, with_phases)
        used = [panel for panel in grid[2 * row] if panel.axison]
        used[0].set_ylabel(f"{runs[0].measure.label}\n(GiB)", fontsize=8.5)
        top = max(panel.get_ylim()[1] for panel in used)
        for panel in used:
            panel.set_ylim(0, top)
    return figure


def _draw_panel(panel: Axes, strips: Axes, k: int, drawn: Sequence[Run], curve: Curve, with_phases: bool) -> None:
    """The curves of one k of one trainer, and below them what phase each run was in; nothing where none was run."""
    if not drawn or not with_phases:
        strips.set_axis_off()
    if not drawn:
        return panel.set_axis_off()
    _draw_curves(panel, drawn, curve)
    panel.set_title(f"k = {k}", loc="left", fontweight="bold")
    if not with_phases:
        return panel.set_xlabel("time since the first sample (s)")
    _draw_phases(strips, drawn)
    strips.set_xlim(panel.get_xlim())
    strips.set_xlabel("time since the first step began (s)")
    panel.tick_params(labelbottom=False)


def representative(runs: Sequence[Run]) -> Run:
    """The first repeat that finished, else the first that went out of memory, else the first."""
    return min(runs, key=lambda run: (run.peak_bytes is None, run.status != "oom", run.repeat))


def without_samples(runs: Sequence[Run]) -> list[Run]:
    """Runs that a timeline would draw, but for their samples, which are only where they were measured."""
    drawn = [representative(cell.runs) for cell in cells(runs)]
    return [run for run in drawn if not len(run.samples) and run.status != "damaged"]


def _draw_curves(panel: Axes, drawn: Sequence[Run], curve: Curve) -> None:
    style.draw_budget(panel, drawn, GIB)
    failures = 0
    cross = {"marker": "x", "markersize": 10, "markeredgewidth": 2.5, "zorder": 8}
    words = {"fontsize": 8, "fontweight": "bold", "zorder": 9, "path_effects": OUTLINE}
    for run in drawn:
        t, y = curve(run)
        panel.plot(t, y / GIB, **style.line(run.arm), linewidth=1.3, gid=run.run_id)
        if run.status in FAILED and len(t):
            panel.plot(t[-1], y[-1] / GIB, color=style.colour(run.arm), **cross)
            style.write_at(panel, _word(run), (t[-1], y[-1] / GIB), 9, 2 + 14 * failures, **words)
            failures += 1
    panel.set_ylim(0, panel.get_ylim()[1] * 1.06)
    panel.set_xlim(left=0)


def _word(run: Run) -> str:
    return "OOM" if run.status == "oom" else run.status


def _draw_phases(panel: Axes, drawn: Sequence[Run]) -> None:
    """One thin strip per arm, from dark to light by phase: colours stay free for the arms."""
    for row, run in enumerate(drawn):
        steps = run.phases[run.phases["phase"].isin(style.PHASE_GREYS)]
        spans = list(zip(steps["t_start"], steps["t_end"] - steps["t_start"], strict=True))
        greys = [style.PHASE_GREYS[phase] for phase in steps["phase"]]
        panel.broken_barh(spans, (row - 0.4, 0.8), facecolors=greys, edgecolors="#808080", linewidth=0.3)
        if run.status in FAILED:
            end = max([0, *(start + length for start, length in spans)])
            panel.text(end, row, f" {_word(run)}", va="center", fontsize=6.5, fontweight="bold")
    panel.set_yticks(range(len(drawn)), [run.arm + (LOST if run.sampler_lost else "") for run in drawn], fontsize=6.5)
    panel.set_ylim(len(drawn) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False)
    panel.spines["left"].set_visible(False)
