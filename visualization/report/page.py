"""results/<machine>/report.html: all that was measured there, in one file that needs nothing else."""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt

from visualization import tables
from visualization.report.answers import answers
from visualization.results import BENCH, GIB, MIB, Results

LOG_LINES = 12
# What a chart shows, for who cannot see it
CHARTS = {
    "peak_comparison": "Peak memory of each arm and k, as bars",
    "timeline_peak_preserving": "Memory over time, every recorded peak drawn",
    "timeline_ultra_smooth": "Memory over time, smoothed: does not show true peaks",
    "audit": "What the published change saves, and where it comes from",
    "peak_by_k": "Peak memory as the number of completions grows, one line an arm",
    "idea": "Whole rows beside prefix sharing: tokens, memory and seconds",
    "convergence": "Reward and KL over the updates, one line an arm",
}


def report(results: Results, charts: Sequence[Path]) -> str:
    """The page as HTML, of its runs and of the charts that were drawn of them."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    scale = results.charted()[0]
    short = tables.of_results("summary", results, BENCH) if BENCH in results.scales() else ""
    return environment.get_template("report.html").render(
        name=results.folder.resolve().name,
        about=results.of(scale).describe(),
        answers=answers(results),
        short=in_html(short + "\n" + tables.of_results("peak", results, scale)),
        pictures=[(CHARTS[path.stem], embedded(path)) for path in charts if path.suffix == ".svg"],
        tables=in_html(tables.page(results)),
        runs=list(every_run(results)),
    )


def in_html(text: str) -> str:
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace('<td style="text-align:right">out of memory</td>', '<td class="failed">out of memory</td>')
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def embedded(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def every_run(results: Results) -> Iterator[dict]:
    """Of each run its facts, in words, and of one that failed its error and the last lines of its log."""
    for _, run in results.runs.iterrows():
        figures = {
            "peak, GiB": run.peak_bytes / GIB,
            "above start, GiB": run.above_bytes / GIB,
            "seconds a step": run.step_seconds,
            "prompt tokens fed": run.fed,
            "seconds between samples": run.achieved_interval_s,
            "peak missed by samples, MiB": (run.peak_missed_bytes or float("nan")) / MIB,
        }
        log = results.folder / run.run_id / "log.txt"
        failed = run.status != "ok"
        yield {
            "name": run.run_id,
            "status": run.status,
            "failed": failed,
            "error": run.error if failed and run.error else "",
            "phase": run.peak_phase if not failed else "",
            "figures": {name: "" if pd.isna(value) else f"{value:,.4g}" for name, value in figures.items()},
            "log": "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            if failed and log.exists()
            else "",
        }
