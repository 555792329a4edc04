"""Memory over time, one panel per k and trainer: once with every peak kept, once smoothed and saying so."""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from visualization import style
from visualization.results import GIB, MEASURES, Results, by_trainer, in_order

Curve = Callable[[Results, pd.Series], pd.DataFrame]


def peak_preserving(results: Results, run: pd.Series) -> pd.DataFrame:
    """`t` and `bytes` to draw, whose maximum is the recorded peak exactly: each phase's high-water mark, which samples
    can miss, is put at its highest sample."""
    curve = sampled(results, run)
    marks = steps_of(results, run).dropna(subset="bytes")[["start", "end", "bytes", "phase"]]
    for row, mark in marks.iterrows():
        inside = curve[curve.t.between(mark.start, mark.end)]
        marks.loc[row, "t"] = inside.t[inside.bytes.idxmax()] if len(inside) else (mark.start + mark.end) / 2
    if len(marks) and run.peak_bytes > marks.bytes.max():  # between phases, or the device's pool and its context
        here = marks[marks.phase == run.peak_phase] if run.peak_phase in set(marks.phase) else marks
        marks.loc[here.bytes.idxmax(), "bytes"] = run.peak_bytes
    return pd.concat([curve, marks[["t", "bytes"]]] if len(marks) else [curve]).sort_values("t", ignore_index=True)


def smoothed(results: Results, run: pd.Series) -> pd.DataFrame:
    """A centred rolling mean over a twentieth of the samples."""
    curve = sampled(results, run)
    mean = curve.bytes.rolling(max(5, len(curve) // 20), center=True, min_periods=1).mean()
    return curve.assign(bytes=mean)


def sampled(results: Results, run: pd.Series) -> pd.DataFrame:
    """After loading: recorded peaks are those of the steps."""
    samples = results.samples(run)
    return samples.loc[samples.t >= 0, ["t", "bytes"]].dropna()


def steps_of(results: Results, run: pd.Series) -> pd.DataFrame:
    """The run's phases after loading, on the clock of its samples."""
    phases = results.phases[(results.phases.run_id == run.run_id) & (results.phases.step > 0)]
    return phases.assign(start=phases.start - run.begin, end=phases.end - run.begin)


def timeline_peak_preserving(results: Results) -> Figure | None:
    return timeline(results, "Memory over time (every recorded peak is drawn)", peak_preserving)


def timeline_ultra_smooth(results: Results) -> Figure | None:
    return timeline(results, "Memory over time (smoothed: does not show true peaks)", smoothed)


def timeline(results: Results, title: str, curve: Curve) -> Figure | None:
    """None where no run has its samples here."""
    runs = results.own.sort_values(
        "status", key=lambda status: status.map({"ok": 0, "oom": 1}).fillna(2), kind="stable"
    )
    drawn = runs.drop_duplicates(["arm", "k"])
    if not any((results.folder / name / "memory.csv").exists() for name in drawn.run_id):
        return None
    ks, columns = sorted(set(drawn.k)), by_trainer(drawn.arm)
    strip = 0.13 * max(map(len, columns)) + 0.1
    note = "one run per arm and k: the first that finished, else one that failed; the strips name each run's phases"
    handles = [Line2D([], [], **style.line(arm), linewidth=1.8, label=arm) for arms in columns for arm in arms]
    edge = {"edgecolor": "#808080", "linewidth": 0.5}
    handles += [Patch(facecolor=grey, label=f"phase: {name}", **edge) for name, grey in style.PHASE_GREYS.items()]
    figure = style.new_figure(13, len(ks) * (2.6 + strip), title, style.footer(results, note), handles, 5)
    figure.get_layout_engine().set(h_pad=0.02, hspace=0)
    grid = figure.subplots(2 * len(ks), len(columns), squeeze=False, height_ratios=[2.0, strip] * len(ks))
    for k, panels, strips in zip(ks, grid[::2], grid[1::2], strict=True):
        for arms, panel, below in zip(columns, panels, strips, strict=True):
            mine = drawn[(drawn.k == k) & drawn.arm.isin(arms)].set_index("arm", drop=False)
            if mine.empty:
                panel.set_axis_off()
                below.set_axis_off()
                continue
            draw_curves(panel, results, mine.loc[in_order(mine.index)], curve)
            draw_phases(below, results, mine.loc[in_order(mine.index)])
            panel.set_title(f"k = {k}", loc="left", fontweight="bold")
            panel.tick_params(labelbottom=False)
            below.set_xlim(panel.get_xlim())
            below.set_xlabel("time since the first step began (s)")
        used = [panel for panel in panels if panel.axison]
        used[0].set_ylabel(f"{MEASURES[results.measure]}\n(GiB)", fontsize=8.5)
        top = max(panel.get_ylim()[1] for panel in used)
        for panel in used:
            panel.set_ylim(0, top)
    return figure


def draw_curves(panel: Axes, results: Results, drawn: pd.DataFrame, curve: Curve) -> None:
    style.draw_budget(panel, results)
    failures = 0
    for _, run in drawn.iterrows():
        points = curve(results, run)
        panel.plot(points.t, points.bytes / GIB, **style.line(run.arm), linewidth=1.3, gid=run.run_id)
        if run.status != "ok" and len(points):
            end = (points.t.iloc[-1], points.bytes.iloc[-1] / GIB)
            panel.plot(*end, "x", color=style.colour(run.arm), markersize=10, markeredgewidth=2.5, zorder=8)
            look = {"fontsize": 8, "fontweight": "bold", "zorder": 9, "bbox": style.BEHIND_TEXT}
            style.write_at(panel, named(run), end, 9, 2 + 14 * failures, **look)
            failures += 1
    panel.set_ylim(0, panel.get_ylim()[1] * 1.06)
    panel.set_xlim(left=0)


def named(run: pd.Series) -> str:
    return "OOM" if run.status == "oom" else run.status


def draw_phases(panel: Axes, results: Results, drawn: pd.DataFrame) -> None:
    """One thin strip per arm, from dark to light by phase: colours stay free for the arms."""
    for row, (_, run) in enumerate(drawn.iterrows()):
        steps = steps_of(results, run)
        spans = list(zip(steps.start, steps.end - steps.start, strict=True))
        greys = [style.PHASE_GREYS.get(phase, "white") for phase in steps.phase]
        panel.broken_barh(spans, (row - 0.4, 0.8), facecolors=greys, edgecolors="#808080", linewidth=0.3)
        if run.status != "ok":
            look = {"va": "center", "fontsize": 6.5, "fontweight": "bold"}
            panel.text(steps.end.max() if len(steps) else 0, row, f" {named(run)}", **look)
    panel.set_yticks(range(len(drawn)), drawn.arm, fontsize=6.5)
    panel.set_ylim(len(drawn) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False)
    panel.spines["left"].set_visible(False)
