"""Everything there is to see of one machine: runs.jsonl of its run folders, combined CSV files, charts, tables.md,
report.html, one screen of text.

python -m visualization.report RESULTS_MACHINE_DIR
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.record import export
from visualization import create_charts, tables
from visualization.report.answers import answers
from visualization.report.page import report
from visualization.results import ARMS, MEASURES, Results, load
from visualization.tables.of_runs import peak_texts

ABOUT = ["run_id", "arm", "scale", "k", "repeat", "status"]


def combined(results: Results) -> pd.DataFrame:
    """One row per sample: what run it is of, then the columns of memory.csv (bytes, seconds)."""
    frames = [results.samples(run).assign(**run[ABOUT]) for _, run in results.runs.iterrows()]
    samples = pd.concat([frame for frame in frames if len(frame)] or [pd.DataFrame(columns=ABOUT)], ignore_index=True)
    return samples[[*ABOUT, *(name for name in samples if name not in (*ABOUT, "t", "bytes"))]]


def statistics(results: Results) -> pd.DataFrame:
    """One row per (scale, arm, k): counts, medians with ranges over the finished runs, how good samples are."""
    sampling = results.own.groupby(["scale", "arm", "k"])[["achieved_interval_s", "peak_missed_bytes"]].max()
    return results.cells.reset_index(drop=True).merge(sampling.reset_index(), on=["scale", "arm", "k"])


def screen(results: Results) -> str:
    """Peaks of the main scale, arm by k, what the figures mean, and where charts and tables are."""
    folder, mine = results.folder, results.of(results.scales()[0])
    peaks = peak_texts(mine).rename_axis(index=None, columns=None)
    peaks.index = [f"{arm} ({ARMS[arm]})" if arm in ARMS else arm for arm in peaks.index]
    others = ", ".join(results.scales()[1:])
    return "\n".join([
        *textwrap.wrap(mine.describe(), 119),
        f"Peak memory above the start level, GiB ({MEASURES[mine.measure]}):", "",
        peaks.to_string(), *mine.footnotes(), "",
        *(line for answer in answers(results) for line in textwrap.wrap(answer, 119, break_on_hyphens=False)), "",
        f"charts: {folder}/charts/*.png",
        f"tables: {folder}/charts/tables.md" + (f", also of the scales {others}" if others else ""),
        f"all of it on one page: {folder}/report.html",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files, print the screen."""
    parser = argparse.ArgumentParser(prog="python -m visualization.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results/<machine>")
    results = load(parser.parse_args(argv).results)
    export(results.folder)
    combined(results).to_csv(results.folder / "combined_memory.csv", index=False)
    statistics(results).to_csv(results.folder / "combined_statistics.csv", index=False)
    charts = results.folder / "charts"
    drawn = create_charts.draw_all(results, charts)
    (charts / "tables.md").write_text(tables.page(results))
    (results.folder / "report.html").write_text(report(results, drawn))
    print(screen(results))
    if not any(path.stem.startswith("timeline") for path in drawn):
        print("no timelines: samples are only in the folder of the machine that measured them")


if __name__ == "__main__":
    main()
