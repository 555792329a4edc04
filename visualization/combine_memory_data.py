"""All samples of all runs as one CSV, and the statistics of every cell as another."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import pandas as pd

from experiments.run_record import SAMPLE_COLUMNS
from visualization.files import whole_file
from visualization.runs import Cell, Run, cells

ABOUT = ("run_id", "arm", "k", "repeat", "status")


def combined(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per sample: run_id, arm, k, repeat, status, then the columns of memory.csv (bytes, seconds)."""
    frames = [run.samples.assign(**{name: getattr(run, name) for name in ABOUT}) for run in runs]
    samples = pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)
    return samples[[*ABOUT, *SAMPLE_COLUMNS]]


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


def write(runs: Sequence[Run], folder: Path) -> None:
    """Write combined_memory.csv and combined_statistics.csv."""
    for name, table in (("combined_memory.csv", combined(runs)), ("combined_statistics.csv", statistics(runs))):
        with whole_file(folder / name) as staging:
            table.to_csv(staging, index=False)
