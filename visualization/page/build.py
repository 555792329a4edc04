"""results/<machine>/report.html: all that was measured there, in one file that needs nothing else.

The answer first, then charts, timelines that can be zoomed and read off, tables that can be sorted, and every run.
uPlot (50 KB, MIT) draws the timelines: of the libraries that zoom and switch curves it is the smallest by far, and the
page is mostly pictures and numbers. The other charts are those of `visualization.create_charts`.
"""

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from markdown_it import MarkdownIt

from visualization import create_charts, seconds, style, tables
from visualization.charts.timelines import peak_preserving, representative
from visualization.files import LoadError, write_text
from visualization.runs import (
    ARMS,
    GIB,
    LEARN,
    MIB,
    Cell,
    Run,
    by_trainer,
    cells,
    compared,
    describe,
    footnotes,
    in_words,
    scales,
    usual_arm,
)

HERE = Path(__file__).parent
POINTS = 300  # of a run's timeline, its recorded peak among them
LOG_LINES = 12
# What a chart shows, for who cannot see it
CHARTS = {
    "peak_comparison": "Peak memory of each arm and k, as bars",
    "audit": "What the published change saves, and where it comes from",
    "phases": "Peak memory of each phase and arm, as bars",
    "frontier": "Peak memory against the seconds of a step, one point an arm",
    "peak_by_k": "Peak memory as the number of completions grows, one line an arm",
    "readme": "Peak memory against seconds, three ways to train",
    "convergence": "Reward, loss and KL over the updates, with and without the change",
}


def report(folder: Path, runs: Sequence[Run], charts: Sequence[Path]) -> str:
    """The page of results/<machine> as HTML, of its runs and of the charts that were drawn of them."""
    shown = [scale for scale in scales(runs) if scale != LEARN] or scales(runs)
    main = next((scale for scale in create_charts.DEFAULT_SCALES if scale in shown), shown[0])
    shown = [main, *(scale for scale in shown if scale != main)]
    by_scale = {scale: [run for run in runs if run.scale == scale] for scale in shown}
    damaged = [run for run in runs if run.status == "damaged"]
    body = [section("answer", "The answer", [answer(scale, mine) for scale, mine in by_scale.items()])]
    drawn = [path for path in charts if path.suffix == ".svg" and not path.stem.startswith("timeline")]  # see below
    parts = []
    for scale in by_scale:
        of_scale = create_charts.folder_of(scale, shown, folder / "charts")
        mine = [path for path in drawn if path.parent == of_scale and path.stem != "convergence"]
        parts.append(f"<h3>Scale {escape(scale)}</h3>" + "".join(map(picture, mine)))
    if learned := [path for path in drawn if path.stem == "convergence"]:
        parts.append("<h3>Training curves</h3>" + "".join(map(picture, learned)))
    body.append(section("charts", "Charts", parts))
    body.append(section("timelines", "Memory over time", [timelines(scale, mine) for scale, mine in by_scale.items()]))
    body.append(section("tables", "Tables", [as_html(folder, runs)]))
    of = {run.run_id: cell for cell in cells(runs) for run in cell.runs}
    body.append(section("runs", "Every run", [finder(), *(of_run(folder, run, of[run.run_id]) for run in runs)]))
    names = {"answer": "answer", "charts": "charts", "timelines": "over time", "tables": "tables", "runs": "runs"}
    left_out = f" {len(damaged)} damaged, left out of charts and tables." if damaged else ""
    files = {name: (HERE / name).read_text() for name in ("report.html", "report.css", "report.js")}
    vendored = {name: (HERE / "uplot" / name).read_text() for name in ("uPlot.min.css", "uPlot.iife.min.js")}
    return Template(files["report.html"]).substitute(
        title=f"RLOO memory: {escape(folder.resolve().name)}",
        about=f"{len(runs)} runs.{left_out} {escape(describe(by_scale[main]))}.",
        nav="".join(f'<a href="#{name}">{words}</a>' for name, words in names.items()),
        body="\n".join(body),
        footer="Timelines: uPlot 1.6.32, Copyright (c) 2022 Leon Sorokin, MIT license.",
        style=vendored["uPlot.min.css"] + files["report.css"],
        script=vendored["uPlot.iife.min.js"] + files["report.js"],
    )


def section(name: str, title: str, parts: Sequence[str]) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n' + "\n".join(parts) + "\n</section>"


def answer(scale: str, runs: Sequence[Run]) -> str:
    """Who needs least and who is fastest at the k that most arms ran at, who ran out of memory, and every cell."""
    table = compared(runs)
    finished = [cell for cell in table if cell.median("above_start_bytes") is not None]
    lines = []
    if finished:
        least = min(finished, key=lambda cell: cell.median("above_start_bytes"))
        most = max(finished, key=lambda cell: cell.median("above_start_bytes"))
        low, high = least.median("above_start_bytes") / GIB, most.median("above_start_bytes") / GIB
        lines.append(f"At k = {least.k}, {called(least)} has the lowest peak above the start level: {low:.2f} GiB.")
        if high > 1.05 * low:
            lines.append(f"The highest is {called(most)} with {high:.2f} GiB.")
        elif most is not least:
            lines.append("None of the others needs 5 % more.")
        clocked = [cell for cell in table if cell.seconds().answer is not None]
        if len(clocked) > 1:
            fast, slow = (end(clocked, key=lambda cell: cell.seconds().answer) for end in (min, max))
            lines.append(
                f"A step takes {fast.seconds().answer:.1f} s with {called(fast)} and "
                f"{slow.seconds().answer:.1f} s with {called(slow)}."
            )
        if apart := [cell.arm for cell in table if cell.seconds().mark]:
            lines.append(
                f"The seconds of {', '.join(apart)} tell nothing: repeats are too far apart ({seconds.MARK})."
            )
    out = [f"{cell.arm} at k = {cell.k}" for cell in cells(runs) if cell.count("oom")]
    out = f'<p class="failed">Out of memory: {escape(", ".join(out))}.</p>' if out else ""
    figures = cell_table(runs)
    notes = [describe(runs), in_words(run.arm for run in runs), *footnotes(runs), *seconds.note([figures])]
    quiet = "".join(f'<p class="quiet">{escape(note)}</p>' for note in notes if note)
    return f"<h3>Scale {escape(scale)}</h3><p>{escape(' '.join(lines))}</p>{out}{figures}{quiet}"


def called(cell: Cell) -> str:
    name, passes = usual_arm(cell.arm)
    words = ARMS.get(name, "an arm of yours")
    return f"{cell.arm} ({words.partition(', two')[0] + f', {passes} completions at a time' if passes else words})"


def cell_table(runs: Sequence[Run]) -> str:
    head = ("arm", "k", "peak above start, GiB", "peak, GiB", "start, GiB", "seconds a step", "runs", "outcome")
    rows = []
    for cell in cells(runs):
        figures = [
            "" if (value := cell.median(name)) is None else f"{value / GIB:.2f}"
            for name in ("above_start_bytes", "peak_bytes", "start_bytes")
        ]
        figures += [cell.seconds().shown(2), str(len(cell.runs)), cell.failure("out of memory") or "finished"]
        rows.append([cell.arm, str(cell.k), *figures])
    return html_table(head, rows, texts=(0, 7))


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int]) -> str:
    kind = lambda i: "" if i in texts else ' class="number"'  # noqa: E731
    first = "".join(f'<th scope="col"{kind(i)}>{escape(name)}</th>' for i, name in enumerate(head))
    lines = ("".join(f"<td{kind(i)}>{escape(text)}</td>" for i, text in enumerate(row)) for row in rows)
    lines = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{lines}</tbody></table></div>'


def picture(path: Path) -> str:
    source = base64.b64encode(path.read_bytes()).decode()
    words = CHARTS.get(path.stem, path.stem.replace("_", " "))
    return f'<figure><img alt="{escape(words)}" src="data:image/svg+xml;base64,{source}"></figure>'


def timelines(scale: str, runs: Sequence[Run]) -> str:
    """One picture a k and trainer: a run of each arm, as in the chart of that name."""
    parts = [f"<h3>Scale {escape(scale)}</h3>"]
    for k in sorted({run.k for run in runs}):
        for arms in by_trainer(run.arm for run in runs if run.k == k):
            mine = [run for run in runs if run.k == k and run.arm in arms]
            drawn = [representative(cell.runs) for cell in cells(mine)]
            curves = [curve_of(run) for run in drawn if len(run.samples)]  # they are where they were measured
            if curves:
                parts.append(timeline(f"k = {k}, {', '.join(arms)}", curves, runs[0].measure.label))
    return "".join(parts)


def curve_of(run: Run) -> dict:
    """Seconds since the first step began and GiB; the run's recorded peak is among the points."""
    t, y = peak_preserving(run.samples, run.phases, POINTS)
    t, first = np.unique(np.round(t, 3), return_index=True)  # one value an instant: the highest
    highest = np.maximum.reduceat(y, first) if len(first) else y
    failed = "" if run.status in ("ok", "unknown") else f" ({run.status})"
    pattern = style.line_style(run.arm)
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


def as_html(folder: Path, runs: Sequence[Run]) -> str:
    """The tables of tables.md."""
    try:
        page = tables.page(folder, runs)
    except LoadError as error:  # a table of another program that is damaged
        return f'<p class="failed">{escape(str(error))}</p>'
    html = (
        MarkdownIt("commonmark", {"html": False})
        .enable("table")
        .render(page.replace("\n## ", "\n### ").replace("## ", "### ", 1))
    )
    html = html.replace('<th style="text-align:right">', '<th scope="col" class="number">')
    html = html.replace('<td style="text-align:right">', '<td class="number">').replace("<th>", '<th scope="col">')
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def finder() -> str:
    return (
        '<p><label for="find">Show runs with: </label><input type="search" id="find" placeholder="shared k8 ok"></p>'
    )


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
        + html_table(("fact", "value"), rows, texts=(0, 1))
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
    return html_table(("phase", "seconds in all", "highest, GiB"), rows, texts=(0,))


def log_end(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ""


def write(folder: Path, runs: Sequence[Run], charts: Sequence[Path]) -> None:
    """Write results/<machine>/report.html."""
    write_text(folder / "report.html", report(folder, runs, charts))
