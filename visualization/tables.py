"""Markdown tables of the runs as they are now, between markers in a file.

    python -m visualization.tables README.md --write | --check
    python -m visualization.tables RESULTS_MACHINE_DIR

A marked place starts with `<!-- table:NAME results/<machine> -->`, or `<!-- table:NAME results/<machine> SCALE -->`
for one scale only, and ends with `<!-- /table -->`. Names: summary, peak, audit, speed, published, phases, rivals,
families, worth, decoding, allocators, cells, sampler, plan, levers, profiles, exactness, kernels, upstream, gpu-peaks,
emulated, launches. The folder is relative to the file.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from visualization import seconds
from visualization.files import LoadError, read_text, run_cli, write_text
from visualization.load import load_machine, tell_damaged
from visualization.pages import check_tables, gpu_peaks, predictions, results, side_by_side
from visualization.runs import Run, describe, footnotes, in_short, scales, shown

PLACE = re.compile(r"(<!-- table:(\S+) (\S+)(?: (\S+))? -->\n)(.*?)<!-- /table -->", re.DOTALL)
# Of the runs of one scale
TABLES: dict[str, Callable[[Sequence[Run]], list[str]]] = {
    "summary": results.summary_table,
    "peak": results.peak_table,
    "audit": results.audit_table,
    "speed": results.speed_table,
    "published": results.published_table,
    "phases": results.phases_table,
}
# Of bench.csv, and of other files of the folder
FOLDER_TABLES: dict[str, Callable[[Path], str]] = {
    "rivals": side_by_side.rivals_table,
    "families": side_by_side.families_table,
    "worth": side_by_side.worth_table,
    "decoding": side_by_side.decoding_table,
    "allocators": side_by_side.allocators_table,
    "cells": side_by_side.cells_table,
    "sampler": side_by_side.sampler_table,
    "plan": predictions.check_table,
    "levers": predictions.levers_table,
    "profiles": predictions.profiles_table,
    "exactness": check_tables.exactness_table,
    "kernels": check_tables.kernels_table,
    "upstream": check_tables.upstream_table,
    "gpu-peaks": gpu_peaks.gpu_peaks_table,
    "emulated": check_tables.emulated_table,
    "launches": check_tables.launches_table,
}
# Of tables on the page
FILES = {
    "plan": "plan_check.csv", "kernels": "kernels.csv", "exactness": "exactness.csv", "upstream": "upstream_tests.csv",
}  # fmt: skip


def render(name: str, folder: Path, scale: str | None = None, load: Callable = load_machine) -> str:
    """The table of that name for every scale of results/<machine> (or one), under a line saying what was measured.

    The scale `learn` is another workload and only shown when asked for. `load` reads a folder's runs.
    Raises LoadError.
    """
    if name in FOLDER_TABLES:
        text = FOLDER_TABLES[name](folder)
        return text + "".join(f"\n{line}.\n" for line in seconds.note([text]))
    if name not in TABLES:
        raise LoadError(f"no table is named {name}; there are {', '.join([*TABLES, *FOLDER_TABLES])}")
    runs = load(folder)
    found = scales(runs)
    if scale and scale not in found:
        raise LoadError(f"{folder}: has no runs at scale {scale}; it has {', '.join(found)}")
    parts = []
    for each in [scale] if scale else sorted(shown(runs)):
        chosen = [run for run in runs if run.scale == each]
        if name == "summary":
            chosen = [run for cell in in_short(chosen) if cell for run in cell.runs] or chosen
        measure = next((run.measure.label for run in chosen if run.peak_bytes is not None), chosen[0].measure.label)
        if lines := TABLES[name](chosen):
            notes = [f"\n{line}." for line in (*footnotes(chosen), *seconds.note(lines))]
            parts.append("\n".join([f"*{describe(chosen)} · {measure}*", "", *lines, *notes]))
    return "\n\n".join(parts) + "\n"


def page(folder: Path, runs: Sequence[Run]) -> str:
    """Every table that the folder has something for, each under a heading."""
    names = [*TABLES, *sorted(side_by_side.measured(folder) & FOLDER_TABLES.keys())]
    names += [name for name, file in FILES.items() if (folder / file).exists()]
    tables = {name: render(name, folder, load=lambda folder: runs) for name in names}
    return "\n".join(f"## {name}\n\n{text}" for name, text in tables.items() if text.strip())


def fill(path: Path, load: Callable = load_machine) -> tuple[str, list[str]]:
    """The file's text with every marked table rendered anew, and the names of those that differ. Raises LoadError."""
    text = read_text(path, "give a file with table markers, or a results folder")
    stale: list[str] = []

    def replace(found: re.Match) -> str:
        start, name, folder, scale, old = found.groups()
        new = "\n" + render(name, path.parent / folder, scale, load) + "\n"
        if new != old:
            stale.append(f"{name} {folder}" + (f" {scale}" if scale else ""))
        return start + new + "<!-- /table -->"

    filled, count = PLACE.subn(replace, text)
    opened = text.count("<!-- table:")
    if count == 0 or count != opened:
        raise LoadError(
            f"{path}: {count} complete table places for {opened} opening markers; write "
            "<!-- table:peak results/<machine> --> and <!-- /table --> on lines of their own"
        )
    return filled, stale


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or check tables; 1 when --check finds a stale one or a run was left out. Raises LoadError."""
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
        runs = load_machine(args.path)
        print(page(args.path, runs), end="")
        return tell_damaged(runs)
    if not (args.write or args.check):
        parser.error(f"{args.path} is no results folder: say --write or --check")
    read: dict[Path, tuple[Run, ...]] = {}  # each folder once, for all of its tables

    def load(folder: Path) -> tuple[Run, ...]:
        if folder not in read:
            read[folder] = load_machine(folder)
        return read[folder]

    text, stale = fill(args.path, load)
    if args.write and stale:
        write_text(args.path, text)
    for table in stale:
        print(f"{args.path}: table {table} " + ("is out of date; run with --write" if args.check else "written"))
    damaged = max((tell_damaged(runs) for runs in read.values()), default=0)
    return 1 if damaged or (args.check and stale) else 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
