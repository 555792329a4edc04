"""Everything there is to see of one machine: combined CSV files, charts, tables.md, report.html, one screen of text.

python -m visualization.report RESULTS_MACHINE_DIR
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from visualization import combine_memory_data, create_charts, tables
from visualization.charts.timelines import without_samples
from visualization.files import run_cli, write_text
from visualization.load import load_machine, tell_damaged
from visualization.page import build
from visualization.page.answers import PEAK
from visualization.pages.lines import entry
from visualization.runs import ARMS, GIB, Cell, Run, cells, describe, footnotes, in_order, scales, shown

SCREEN = 24  # lines
WIDTH = 119


def screen(folder: Path, runs: Sequence[Run], width: int = WIDTH) -> list[str]:
    """At most `SCREEN` lines: peaks of the main scale, arm by k, what they mean, and where charts and tables are.

    What they mean is whole, in lines of `width`: it says what to make of the figures.
    """
    scale = shown(runs)[0]
    chosen = [run for run in runs if run.scale == scale]
    table = {(cell.arm, cell.k): cell for cell in cells(chosen)}
    wrap = textwrap.TextWrapper(max(width, 40), break_on_hyphens=False).wrap  # arms' names have hyphens
    meaning = ["", *(row for verdict in _meaning(table) for row in wrap(verdict))]
    others = [other for other in scales(runs) if other != scale]
    end = ["", f"charts: {folder}/charts/*.png", f"tables: {folder}/charts/tables.md"]
    end[-1] += f", also of the scales {', '.join(others)}" if others else ""
    end.append(f"all of it on one page: {folder}/report.html")
    notes = footnotes(chosen)
    what = f"Peak memory above the start level, GiB ({chosen[0].measure.label}):"
    head = [*textwrap.wrap(describe(chosen), WIDTH), what, ""]
    rows = _rows(table)
    room = SCREEN - len(head) - len(meaning) - len(notes) - len(end)
    if len(rows) > room:
        rows = [*rows[: room - 1], f"... {len(rows) - room + 1} more arms in tables.md"]
    cut = [line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..." for line in [*head, *rows, *notes]]
    return [*cut, *meaning, *end]  # paths stay whole


def _rows(table: dict[tuple[str, int], Cell]) -> list[str]:
    ks = sorted({k for _, k in table})
    rows = [["", *(f"k = {k}" for k in ks)]]
    for arm in in_order(arm for arm, _ in table):
        rows.append([arm, *(entry(table.get((arm, k)), PEAK.text) for k in ks)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join([*cells, ARMS.get(row[0], "")]).rstrip() for row, cells in zip(rows, padded, strict=True)]


def _meaning(table: dict[tuple[str, int], Cell]) -> list[str]:
    """What the figures say, three sentences, each at the largest k where both sides finished."""
    published, string = _saved(table, "classic-string", "classic-baseline")
    if string:
        asked, fed = string.first("prompt_tokens_requested"), string.first("prompt_tokens_fed_mean")
        known = f"{fed:,.0f} of {asked:,.0f}" if asked and fed else "an unknown part of its"
        published += f", and it fed {known} prompt tokens"
    exact, _ = _saved(table, "classic-string-exact", "classic-baseline")
    lean, _ = _saved(table, "classic-lean", "classic-baseline")
    shared, _ = _saved(table, "shared", "stock-accumulate")  # the strongest rival
    return [
        f"The change published in 2025: {published}.",
        f"The same idea with nothing cut: {exact}.",
        f"At equal tokens: classic-lean {lean}; shared {shared}.",
    ]


def _saved(table: dict[tuple[str, int], Cell], arm: str, reference: str) -> tuple[str, Cell | None]:
    """How much less the arm's peak above start is than the reference's, in words, and the arm's cell."""
    for k in sorted({k for name, k in table if name == arm}, reverse=True):
        ours, theirs = table[arm, k], table.get((reference, k))
        if ours.above is not None and theirs and theirs.above:
            if (fraction := ours.change(theirs)) is None:
                return f"{reference} takes {theirs.above / GIB:.2f} GiB at k = {k}, too little to compare", ours
            less = round(-fraction * 100)
            return f"{abs(less)} % {'more' if less < 0 else 'less'} than {reference} at k = {k}", ours
    return f"not compared, no k where it and {reference} finished", None


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, print the screen, say what is not drawn; 1 when a run is damaged. Raises LoadError."""
    parser = argparse.ArgumentParser(prog="python -m visualization.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results/<machine>")
    args = parser.parse_args(argv)
    runs = load_machine(args.results)
    combine_memory_data.write(runs, args.results)
    charts = args.results / "charts"
    drawn = create_charts.draw_all(runs, charts)
    write_text(charts / "tables.md", tables.page(args.results, runs))
    write_text(args.results / "report.html", build.report(args.results, runs, drawn))
    width = shutil.get_terminal_size((WIDTH, SCREEN)).columns
    print("\n".join(screen(args.results, runs, width)))
    for scale in shown(runs):
        if missing := without_samples([run for run in runs if run.scale == scale]):
            text = f"no timeline of {len(missing)} run(s) of scale {scale}: their samples are not in {args.results}"
            print(text, file=sys.stderr)
    return tell_damaged(runs)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
