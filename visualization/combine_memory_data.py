"""All samples of all runs as one CSV, and the statistics of every cell as another.

python -m visualization.combine_memory_data RESULTS_MACHINE_DIR [--out DIR]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import pandas as pd

from visualization.files import run_cli, whole_file
from visualization.load import SAMPLE_COLUMNS, load, tell_damaged
from visualization.runs import GIB, Cell, Run, cells


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per sample: run_id, arm, k, repeat, status, then the columns of memory.csv (bytes, seconds)."""
    # Runs of a CPU have all-empty device columns, which pandas would rather see typed than guessed.
    frames = [run.samples.reindex(columns=SAMPLE_COLUMNS).astype(float) for run in runs]
    for run, frame in zip(runs, frames, strict=True):
        for place, name in enumerate(("run_id", "arm", "k", "repeat", "status")):
            frame.insert(place, name, getattr(run, name))
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def statistics(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per (scale, arm, k): counts, and medians with ranges over the finished runs (bytes, seconds)."""
    return pd.DataFrame([_row(cell) for cell in cells(runs) if cell.scale])


def _row(cell: Cell) -> dict:
    row = {"scale": cell.scale, "arm": cell.arm, "k": cell.k, "runs": len(cell.runs)}
    row |= {status: cell.count(status) for status in ("ok", "oom", "error", "killed", "damaged", "unknown")}
    for name, unit, values in (
        ("peak", "_bytes", cell.values("peak_bytes")),
        ("above_start", "_bytes", cell.values("above_start_bytes")),
        ("step_seconds", "", cell.seconds().values),
    ):
        for what, of in (("median", median), ("min", min), ("max", max)):
            row[f"{name}_{what}{unit}"] = of(values) if values else None
    row["start_median_bytes"] = cell.median("start_bytes")
    for name, figure, of in (
        ("prompt_tokens_fed_mean", "prompt_tokens_fed_mean", mean),
        ("sampler_achieved_interval_s", "achieved_interval_s", max),
        ("peak_missed_max_bytes", "peak_missed_bytes", max),
    ):
        known = [value for run in cell.runs if (value := getattr(run, figure)) is not None]
        row[name] = of(known) if known else None
    return row


def write(runs: Sequence[Run], out: Path) -> int:
    """Write combined_memory.csv and combined_statistics.csv. Returns the number of samples."""
    out.mkdir(parents=True, exist_ok=True)
    samples = combined(runs)
    for name, table in (("combined_memory.csv", samples), ("combined_statistics.csv", statistics(runs))):
        with whole_file(out / name) as staging:
            table.to_csv(staging, index=False)
    return len(samples)


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files and print a summary; 1 when a run was left out. Raises LoadError."""
    parser = argparse.ArgumentParser(prog="python -m visualization.combine_memory_data", description=__doc__)
    parser.add_argument("results", type=Path, help="results/<machine>, a folder of 2025, or a combined CSV of 2025")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the results folder)")
    args = parser.parse_args(argv)
    runs = load(args.results)
    out = args.out or (args.results if args.results.is_dir() else args.results.parent)
    samples = write(runs, out)
    print(f"{len(runs)} runs, {samples} samples -> combined_memory.csv, combined_statistics.csv in {out}")
    for cell in cells(runs):
        peak = cell.median("peak_bytes")
        shown = "" if peak is None else f"median peak {peak / GIB:.2f} GiB"
        print(f"  {cell.scale:8} {cell.arm:22} k={cell.k:<3} {shown:26} {cell.failure()}".rstrip())
    return tell_damaged(runs)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
