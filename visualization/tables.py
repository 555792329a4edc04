"""Markdown tables from summary.csv, between markers in a file.

    python -m visualization.tables README.md --write | --check
    python -m visualization.tables RESULTS_MACHINE_DIR

A marked place starts with `<!-- table:NAME results/<machine> -->`, or `<!-- table:NAME results/<machine> SCALE -->`
for one scale only, and ends with `<!-- /table -->`. Names: peak, audit, speed, published, phases, rivals, plan,
levers, profiles, exactness, sampler, shapes. The folder is relative to the file.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from visualization.bench import phases_table
from visualization.evidence import exactness_table, sampler_table, shapes_table
from visualization.load import load_machine, load_summary
from visualization.plan import check_table, levers_table, profiles_table
from visualization.rivals import rivals_table
from visualization.runs import (
    GIB,
    LEARN,
    PUBLISHED_BUDGET,
    PUBLISHED_GB,
    PUBLISHED_PROMPT,
    Cell,
    LoadError,
    Run,
    cells,
    describe,
    in_order,
    markdown,
    read_text,
    run_cli,
)

BASELINE = "classic-baseline"
NOISY = 0.02  # a spread above this fraction of the median is shown
PLACE = re.compile(r"<!-- table:(\S+) (\S+)(?: (\S+))? -->\n(.*?)<!-- /table -->", re.DOTALL)


def peak_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median peak above start in GiB, its range where noisy, its change against the baseline."""

    def show(cell: Cell, table: dict) -> str:
        above = cell.median("above_start_bytes")
        if above is None:
            return "no start level"
        text = _with_range(cell, "above_start_bytes", GIB)
        reference = table.get((BASELINE, cell.k))
        theirs = reference and reference.median("above_start_bytes")
        return text + (f", {_signed(above / theirs - 1)}" if theirs and cell.arm != BASELINE else "")

    return [
        f"Peak memory above the start level, GiB (change against `{BASELINE}` at the same k):",
        "",
        *_by_k(runs, show),
    ]


def speed_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median seconds per step."""

    def show(cell: Cell, table: dict) -> str:
        return _with_range(cell, "step_seconds_median", 1) if cell.values("step_seconds_median") else "not recorded"

    return ["Seconds per step, median:", "", *_by_k(runs, show)]


def audit_table(runs: Sequence[Run]) -> list[str]:
    """One row per arm and k: prompt tokens asked for and really fed, peak above start, and GiB per 1,000 tokens."""
    rows = []
    for cell in cells(runs):
        first = cell.runs[0]
        above, tokens = cell.median("above_start_bytes"), cell.median("tokens_in_batch")
        fed = next((run.prompt_tokens_fed_mean for run in cell.runs if run.prompt_tokens_fed_mean is not None), None)
        figures = [_whole(first.prompt_tokens_requested), _whole(fed)]
        if not cell.finished:
            figures += [_failure(cell), ""]
        else:
            figures += [
                "" if above is None else f"{above / GIB:.2f}" + _failure(cell, " ({})"),
                "" if above is None or not tokens else f"{above / GIB / tokens * 1000:.3f}",
            ]
        rows.append([f"`{cell.arm}`", str(cell.k), *figures])
    header = [
        "arm",
        "k",
        "prompt tokens requested",
        "prompt tokens fed (mean)",
        "peak above start, GiB",
        "GiB per 1,000 tokens in the batch",
    ]
    return ["Tokens asked for, tokens really fed, and the memory they took:", "", *markdown(header, rows)]


def published_table(runs: Sequence[Run]) -> list[str]:
    """The published cells beside ours: peak above start in GB, times the factor by which the scale was made smaller.

    The factor is the published card's 32 GiB over the run's budget, as vocabulary and budget shrink together. Empty
    for a scale with other prompts than the published 3,000 tokens.
    """
    table = {(cell.arm, cell.k): cell for cell in cells(runs)}
    rows, factors = [], set()
    for (arm, k), published in PUBLISHED_GB.items():
        cell = table.get((arm, k))
        budget = cell.runs[0].budget_bytes if cell else None
        if not budget or cell.runs[0].prompt_tokens_requested != PUBLISHED_PROMPT:
            continue
        factor = PUBLISHED_BUDGET / budget
        factors.add(f"{factor:g}")
        above = cell.median("above_start_bytes")
        ours = _failure(cell) if not cell.finished or above is None else f"{above * factor / 1e9:.2f}"
        rows.append([f"`{arm}`", str(k), ours, f"{published:.2f}" if published else "out of memory"])
    if not rows:
        return []
    header = ["arm", "k", f"above start x {' or '.join(sorted(factors))}, GB", "published 2025, GB"]
    return [
        "Ours, scaled up, beside the published figures (RTX 5090, device-wide, CUDA context included):",
        "",
        *markdown(header, rows),
    ]


TABLES: dict[str, Callable[[Sequence[Run]], list[str]]] = {
    "peak": peak_table,
    "audit": audit_table,
    "speed": speed_table,
    "published": published_table,
    "phases": phases_table,
}
FOLDER_TABLES: dict[str, Callable[[Path], str]] = {  # from other files than summary.csv
    "rivals": rivals_table,
    "plan": check_table,
    "levers": levers_table,
    "profiles": profiles_table,
    "exactness": exactness_table,
    "sampler": sampler_table,
    "shapes": shapes_table,
}


def render(name: str, folder: Path, scale: str | None = None) -> str:
    """The table of that name for every scale of results/<machine> (or one), under a line saying what was measured.

    The scale `learn` is another workload and only shown when asked for. Raises LoadError.
    """
    if name in FOLDER_TABLES:
        return FOLDER_TABLES[name](folder)
    if name not in TABLES:
        raise LoadError(f"no table is named {name}; there are {', '.join([*TABLES, *FOLDER_TABLES])}")
    runs = load_machine(folder) if name == "phases" else load_summary(folder)
    found = sorted({run.scale for run in runs})
    if scale and scale not in found:
        raise LoadError(f"{folder}/summary.csv: has no runs at scale {scale}; it has {', '.join(found)}")
    parts = []
    for shown in [scale] if scale else [scale for scale in found if scale != LEARN] or found:
        chosen = [run for run in runs if run.scale == shown]
        measure = next((run.measure.label for run in chosen if run.peak_bytes is not None), chosen[0].measure.label)
        if lines := TABLES[name](chosen):
            parts.append("\n".join([f"*{describe(chosen)} · {measure}*", "", *lines]))
    return "\n\n".join(parts) + "\n"


def fill(path: Path) -> tuple[str, list[str]]:
    """The file's text with every marked table rendered anew, and the names of those that differ. Raises LoadError."""
    text = read_text(path, "give a file with table markers, or a results folder")
    stale: list[str] = []

    def replace(found: re.Match) -> str:
        name, folder, scale, old = found.groups()
        new = "\n" + render(name, path.parent / folder, scale) + "\n"
        if new != old:
            stale.append(f"{name} {folder}" + (f" {scale}" if scale else ""))
        start = found.group(0)[: found.start(4) - found.start(0)]
        return start + new + "<!-- /table -->"

    filled, count = PLACE.subn(replace, text)
    opened = text.count("<!-- table:")
    if count == 0 or count != opened:
        raise LoadError(
            f"{path}: {count} complete table places for {opened} opening markers; write "
            "<!-- table:peak results/<machine> --> and <!-- /table --> on lines of their own"
        )
    return filled, stale


def _by_k(runs: Sequence[Run], show: Callable[[Cell, dict], str]) -> list[str]:
    table = {(cell.arm, cell.k): cell for cell in cells(runs)}
    ks = sorted({k for _, k in table})
    rows = []
    for arm in in_order(arm for arm, _ in table):
        row = [table.get((arm, k)) for k in ks]
        rows.append(
            [
                f"`{arm}`",
                *(
                    "not run"
                    if cell is None
                    else _failure(cell)
                    if not cell.finished
                    else show(cell, table) + _failure(cell, " ({})")
                    for cell in row
                ),
            ]
        )
    return markdown(["arm", *(f"k = {k}" for k in ks)], rows)


def _with_range(cell: Cell, name: str, unit: float) -> str:
    values, middle = cell.values(name), cell.median(name)
    spread = (max(values) - min(values)) / middle if middle else 0
    told = f" ({min(values) / unit:.2f} to {max(values) / unit:.2f})" if spread > NOISY else ""
    return f"{middle / unit:.2f}{told}"


def _failure(cell: Cell, form: str = "{}") -> str:
    told = cell.failure("out of memory")
    return form.format(told) if told else ""


def _signed(fraction: float) -> str:
    return f"{fraction * 100:+.1f} %".replace("-", "\N{MINUS SIGN}")


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or check tables; 1 when --check finds a stale one. Raises LoadError."""
    parser = argparse.ArgumentParser(
        prog="python -m visualization.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="a file with table markers, or results/<machine> to print its tables")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="bring the file's tables up to date")
    action.add_argument("--check", action="store_true", help="exit 1 and name each table that is not up to date")
    args = parser.parse_args(argv)
    if args.path.is_dir():
        print("\n".join(render(name, args.path) for name in TABLES), end="")
        return 0
    if not (args.write or args.check):
        parser.error(f"{args.path} is no results folder: say --write or --check")
    text, stale = fill(args.path)
    if args.write and stale:
        args.path.write_text(text, encoding="utf-8")
    for table in stale:
        print(f"{args.path}: table {table} " + ("is out of date; run with --write" if args.check else "written"))
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
