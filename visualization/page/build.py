"""results/<machine>/report.html: all that was measured there, in one file that needs nothing else.

How much memory, how much time, is it exact; then timelines that can be zoomed and read off, charts, tables that can be
sorted, and every run.
uPlot (50 KB, MIT) draws the timelines: of the libraries that zoom and switch curves it is the smallest by far, and the
page is mostly pictures and numbers. The other charts are those of `visualization.create_charts`.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from visualization import seconds, style, tables
from visualization.charts.timelines import peak_preserving, representative, without_samples
from visualization.page import answers, html
from visualization.runs import GIB, MIB, Cell, Run, by_trainer, cells, charted, describe, shown

HERE = Path(__file__).parent
POINTS = 300  # of a run's timeline, its recorded peak among them
LOG_LINES = 12


def report(folder: Path, runs: Sequence[Run], charts: Sequence[Path]) -> str:
    """The page of results/<machine> as HTML, of its runs and of the charts that were drawn of them."""
    of = {scale: [run for run in runs if run.scale == scale] for scale in shown(runs)}
    asked = [(scale, of[scale]) for scale in charted(runs)]
    summary = tables.render("summary", folder, load=lambda _: runs)  # README's rows
    drawn = [path for path in charts if path.suffix == ".svg" and not path.stem.startswith("timeline")]  # see above
    cell_of = {run.run_id: cell for cell in cells(runs) for run in cell.runs}
    sections = {
        "memory": ("How much memory?", [in_scale(scale, answers.memory(mine)) for scale, mine in asked]),
        "time": ("How much time?", [in_scale(scale, answers.time(mine)) for scale, mine in asked]),
        "exact": ("Is it exact?", [answers.exact(runs)]),
        "short": ("In short", [html.of_markdown(summary)] if summary.strip() else ["<p>For runs of bench only.</p>"]),
        "timelines": ("Memory over time", [timelines(scale, mine) for scale, mine in of.items()]),
        "charts": ("Charts", [html.picture(path) for path in drawn]),
        "tables": ("Tables", [html.of_markdown(tables.page(folder, runs))]),
        "runs": ("Every run", [FINDER, *(of_run(folder, run, cell_of[run.run_id]) for run in runs)]),
    }
    damaged = sum(run.status == "damaged" for run in runs)
    left_out = f" {damaged} damaged, left out of charts and tables." if damaged else ""
    files = {name: (HERE / name).read_text() for name in ("report.html", "report.css", "report.js")}
    vendored = {name: (HERE / "uplot" / name).read_text() for name in ("uPlot.min.css", "uPlot.iife.min.js")}
    return Template(files["report.html"]).substitute(
        title=f"RLOO memory: {escape(folder.resolve().name)}",
        about=f"{len(runs)} runs.{left_out} {escape(describe(asked[0][1]))}.",
        nav="".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in sections.items()),
        body="\n".join(html.section(name, title, parts) for name, (title, parts) in sections.items()),
        footer="Timelines: uPlot 1.6.32, Copyright (c) 2022 Leon Sorokin, MIT license.",
        style=vendored["uPlot.min.css"] + files["report.css"],
        script=vendored["uPlot.iife.min.js"] + files["report.js"],
    )


def in_scale(scale: str, answer: str) -> str:
    return f"<h3>Scale {escape(scale)}</h3>{answer}"


def timelines(scale: str, runs: Sequence[Run]) -> str:
    """One picture a k and trainer: a run of each arm, as in the chart of that name; those without samples by name."""
    parts = []
    for k in sorted({run.k for run in runs}):
        for arms in by_trainer(run.arm for run in runs if run.k == k):
            mine = [run for run in runs if run.k == k and run.arm in arms]
            drawn = [representative(cell.runs) for cell in cells(mine)]
            curves = [curve_of(run) for run in drawn if len(run.samples)]
            if curves:
                parts.append(timeline(f"k = {k}, {', '.join(arms)}", curves, runs[0].measure.label))
    if missing := without_samples(runs):
        names = escape(", ".join(run.run_id for run in missing))
        parts.append(f"<p>No curve, because the samples are not in this folder: {names}.</p>")
    return in_scale(scale, "".join(parts))


def curve_of(run: Run) -> dict:
    """Seconds since the first step began and GiB; the run's recorded peak is among the points."""
    t, y = peak_preserving(run.samples, run.phases, POINTS)
    t, first = np.unique(np.round(t, 3), return_index=True)  # one value an instant: the highest
    highest = np.maximum.reduceat(y, first) if len(first) else y
    failed = "" if run.status in ("ok", "unknown") else f" ({run.status})"
    pattern = style.line(run.arm)["linestyle"]
    dash = [] if isinstance(pattern, str) else [3 * length for length in pattern[1]]
    return {
        "name": run.run_id + failed,
        "colour": style.colour(run.arm),
        "dash": dash or ([6, 3, 1, 3] if pattern == "-." else []),
        "t": t.tolist(),
        "y": [round(value, 4) for value in (highest / GIB).tolist()],
    }


def timeline(title: str, curves: Sequence[dict], measure: str) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{i}"><span class="line" style="background:{swatch(curve)}">'
        f"</span>{escape(curve['name'])}</label>"
        for i, curve in enumerate(curves, 1)
    )
    data = json.dumps(curves).replace("<", "\\u003c")
    return (
        f'<h4>{escape(title)}</h4><div class="arms">{boxes}</div>'
        f'<div class="timeline" role="img" aria-label="Memory over time, {escape(title)}" '
        f'data-clock="seconds since the first step began" data-measure="{escape(measure)}, GiB">'
        f'<script type="application/json">{data}</script></div>'
    )


def swatch(curve: dict) -> str:
    return "currentColor" if curve["colour"] == "#000000" else curve["colour"]  # black cannot be seen on a dark page


FINDER = '<p><label for="find">Show runs with: </label><input type="search" id="find" placeholder="shared k8 ok"></p>'


def of_run(folder: Path, run: Run, cell: Cell) -> str:
    """Facts, phases, the sampler's quality and the log's last lines, folded away under the run's name."""
    took = cell.seconds()
    apart = f"{min(took.values):.1f} to {max(took.values):.1f}. {seconds.NOTE}" if took.mark else ""
    above = "" if run.above_start_bytes is None else f", {run.above_start_bytes / GIB:.2f} GiB above start"
    outcome = escape(f"{run.run_id}: {run.status}{above}")
    mark = "" if run.status in ("ok", "unknown") else ' class="failed"'
    facts = [
        ("error", run.error), ("device", run.device_name), ("trl", run.trl_version), ("torch", run.torch_version),
        ("transformers", run.transformers_version), ("commit", run.commit),
        ("prompt tokens fed", run.prompt_tokens_fed_mean), ("completion tokens", run.completion_tokens),
        ("completions in a batch", run.batch), ("peak phase", run.peak_phase),
        ("budget, GiB", run.budget_bytes and run.budget_bytes / GIB),
        ("start, GiB", run.start_bytes and run.start_bytes / GIB),
        *((name.removesuffix("_bytes").replace("_", " ") + ", GiB", value and value / GIB)
          for name, value in run.peaks.items()),
        ("seconds a step", run.step_seconds_median), ("seconds a step of all repeats", apart),
        ("sampler: seconds between samples", run.achieved_interval_s),
        ("sampler: peak missed between samples, MiB", run.peak_missed_bytes and run.peak_missed_bytes / MIB),
        ("sampler lost", run.sampler_lost),
    ]  # fmt: skip
    rows = [(name, in_text(value)) for name, value in facts if value not in (None, "")]
    log = log_end(folder / run.run_id / "log.txt")
    return (
        f'<details class="run"><summary{mark}>{outcome}</summary>'
        + html.table(("fact", "value"), rows, texts=(0, 1))
        + phases_of(run)
        + (f"<h4>The log's last lines</h4><pre>{escape(log)}</pre>" if log else "")
        + "</details>"
    )


def in_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def phases_of(run: Run) -> str:
    """The highest mark and the seconds of each phase, over all steps."""
    if run.phases.empty:
        return ""
    rows = []
    for phase, mine in run.phases.groupby("phase", sort=False):
        mark = mine["mark_bytes"].max()
        rows.append((phase, f"{(mine['end'] - mine['start']).sum():.1f}", "" if mark != mark else f"{mark / GIB:.2f}"))
    return html.table(("phase", "seconds in all", "highest, GiB"), rows, texts=(0,))


def log_end(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ""
