"""results/<machine>/report.html: all that was measured there, in one file that needs nothing else."""

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt

from visualization import tables
from visualization.report.answers import answers
from visualization.results import BENCH, FAILURES, GIB, MIB, Results

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
    pictures = sorted((path for path in charts if path.suffix == ".svg"), key=lambda path: path.stem != "idea")
    return environment.get_template("report.html").render(
        name=results.folder.resolve().name,
        about=results.of(scale).describe(),
        answers=answers(results),
        short=in_html(short + "\n" + tables.of_results("peak", results, scale)),
        pictures=[(CHARTS[path.stem], base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        tables=in_html(tables.page(results)),
        runs=every_run(results),
        failures=failures(results),
    )


def in_html(text: str) -> str:
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace('<td style="text-align:right">out of memory</td>', '<td class="failed">out of memory</td>')
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def every_run(results: Results) -> str:
    """A row a run."""
    runs = results.runs
    table = runs[["run_id", "status", "peak_phase"]].assign(peak=runs.peak_bytes / GIB, above=runs.above_bytes / GIB)
    table[["seconds", "fed", "interval"]] = runs[["step_seconds", "fed", "achieved_interval_s"]]
    table["missed"] = runs.peak_missed_bytes.astype(float) / MIB
    table.columns = ["run", "status", "peaks in", "peak, GiB", "above start, GiB", "seconds a step",
                     "prompt tokens fed", "seconds between samples", "peak missed by samples, MiB"]  # fmt: skip
    html = table.to_html(index=False, border=0, na_rep="", float_format="{:,.4g}".format)
    for status in FAILURES:
        html = html.replace(f"<td>{status}</td>", f'<td class="failed">{FAILURES[status]}</td>')
    return html


def failures(results: Results) -> list[tuple[str, str, str]]:
    """Of each run that failed its name, its error and the last lines of its log."""
    failed = results.runs[results.runs.status != "ok"]
    logs = [results.folder / name / "log.txt" for name in failed.run_id]
    ends = ["\n".join(log.read_text().splitlines()[-LOG_LINES:]) if log.exists() else "" for log in logs]
    return list(zip(failed.run_id, failed.error.fillna(""), ends, strict=True))
