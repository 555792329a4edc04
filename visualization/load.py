"""Load the runs of a results folder: this project's layout (`experiments.run_record`) or the one of 2025.

Every run gives one Run. One that cannot be used gives a Run of status `damaged` in its place, so that the others are
still drawn and the gap has a name. Samples are there on the machine that measured them alone.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.run_record import (
    PHASE_COLUMNS,
    SAMPLE_COLUMNS,
    RunRecord,
    StoredRun,
    defaults,
    read_rows,
    stored_runs,
)
from visualization import legacy
from visualization.files import LoadError
from visualization.runs import DEVICE_USED, RESERVED, RESIDENT, TIMES, Measure, Run

RERUN = "delete the run's folder and run it again"
# Fields of a Run as they are in the record
SAME = {each.name for each in fields(Run)} & {each.name for each in fields(RunRecord)} - {"trace"}
TEXT = ("device_kind", "device_name", "trl_version", "torch_version", "transformers_version", "peak_phase")
PEAKS = ("peak_device_used_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes")
TRACE_FIELDS = ("step", "reward", "loss", "kl")
# What the suite calls a run's folder; damaged folders have nothing else to say what they were
RUN_ID = re.compile(r"(?P<arm>.+)_(?P<scale>[^_]+)_k(?P<k>\d{1,6})(?:_c\d{1,6})?_r(?P<repeat>\d{1,6})")


def load(path: Path) -> tuple[Run, ...]:
    """Runs of a machine folder, of a folder in the 2025 layout, or of a combined 2025 CSV file. Raises LoadError."""
    if path.is_dir() and not any(path.glob("*/run.json")) and legacy.log_files(path):
        return legacy.load_folder(path)
    return legacy.load_combined(path) if path.is_file() else load_machine(path)


def load_machine(folder: Path) -> tuple[Run, ...]:
    """Every run under results/<machine>, ordered by run id, damaged ones included.

    Raises LoadError for a missing or empty folder, and where not one run can be used."""
    if not folder.is_dir():
        raise LoadError(f"{folder}: no such results folder; give one that the suite wrote, like results/<machine>")
    stored = stored_runs(folder)
    if not stored:
        raise LoadError(f"{folder}: holds no runs; run ./run_baseline-rloo.sh first, or give another machine's folder")
    runs = tuple(map(run_of, stored))
    damaged = [run.error for run in runs if run.status == "damaged"]
    if len(damaged) == len(runs):
        more = f" (and {len(runs) - 1} more, none can be used)" if len(runs) > 1 else ""
        raise LoadError(damaged[0] + more)
    return with_times(runs)


def with_times(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, where those of a scale like `bench-time` have become the `timed` of the same cell of `bench`."""
    timed: dict[tuple, tuple[Run, ...]] = {}
    cells = {(run.scale, run.arm, run.k) for run in runs}
    for run in runs:
        cell = (run.scale.removesuffix(TIMES), run.arm, run.k)
        if run.scale.endswith(TIMES) and run.status == "ok" and cell in cells:
            timed[cell] = (*timed.get(cell, ()), run)
    found = {run.run_id for each in timed.values() for run in each}
    return tuple(
        replace(run, timed=timed.get((run.scale, run.arm, run.k), ())) for run in runs if run.run_id not in found
    )


def tell_damaged(runs: Sequence[Run]) -> int:
    """One line on stderr for each damaged run. Returns the exit code: 1 when there is one, else 0."""
    lines = [" ".join(f"left out: {run.error}".split()) for run in runs if run.status == "damaged"]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def run_of(stored: StoredRun) -> Run:
    """The Run of a record with its phases and, where they are here, its samples."""
    record = stored.record or damaged_record(stored)
    own = {name: record[name] for name in SAME} | {name: record[name] or "" for name in TEXT}
    if unusual := re.search(r"_c(\d+)_r\d+$", record["run_id"]):  # not the arm's usual number: never the same cell
        own["arm"] += f"-c{unusual[1]}"
    if record["status"] == "running":
        own |= {"status": "killed", "error": "killed before it could report"}
    ok = record["status"] == "ok"
    measure = main_measure(record)
    sampler = record["sampler"] or {}
    run = Run(
        **own,
        measure=measure,
        samples=pd.DataFrame(),
        phases=pd.DataFrame(),
        peak_bytes=record[measure.record_column] if ok else None,
        peaks={name: record[name] for name in PEAKS} if ok else {},
        achieved_interval_s=sampler.get("achieved_interval_s"),
        peak_missed_bytes=sampler.get("peak_missed_bytes"),
        sampler_lost=sampler_lost(record) if ok else "",
        trace=tuple({name: step.get(name) for name in TRACE_FIELDS} for step in record["trace"]),
    )
    samples = read_rows(stored.folder / "memory.csv") if stored.folder and stored.record else ()
    return with_curve(run, frame(samples, SAMPLE_COLUMNS), frame(stored.phases, PHASE_COLUMNS))


def damaged_record(stored: StoredRun) -> dict:
    """What a damaged run's folder says by its name; without a scale where that is no name of the suite's."""
    named = RUN_ID.fullmatch(stored.run_id)
    told = named.groupdict() if named else {"arm": stored.run_id, "scale": "", "k": 0, "repeat": 0}
    told |= {"k": int(told["k"]), "repeat": int(told["repeat"]), "status": "damaged", "commit": ""}
    error = f"{stored.folder / 'run.json'}: {stored.damage}; {RERUN}"
    return defaults() | told | {"run_id": stored.run_id, "error": error}


def sampler_lost(record: dict) -> str:
    """When the sampler of a finished run was lost, in words, or "". One without the sampler's report lost it, too."""
    if record["sampler"] is None:
        return "nobody knows when"
    after, source = (record["sampler"].get(name) for name in ("lost_after_s", "peak_from"))
    return "" if after is None else f"after {after:.0f} s" + (f", peak from {source}" if source else "")


def main_measure(record: dict) -> Measure:
    if record["device_kind"] != "cuda":
        return RESIDENT
    without_nvml = record["peak_device_used_bytes"] is None and record["peak_reserved_bytes"] is not None
    return RESERVED if without_nvml else DEVICE_USED


def frame(rows, columns: tuple[str, ...]) -> pd.DataFrame:
    """Of rows by column: numbers, but for the phase's name."""
    found = pd.DataFrame(list(rows), columns=list(columns))
    return found.astype({name: object if name == "phase" else float for name in columns})


def with_curve(run: Run, samples: pd.DataFrame, phases: pd.DataFrame) -> Run:
    """Put samples and phases on one clock and one measure, and the recorded peak into its phase.

    Recorded peaks are those after loading, so the curve starts with the first step: loading has no `bytes`.
    """
    steps = phases["phase"] != "load"
    samples = samples.sort_values("timestamp", kind="stable", ignore_index=True)
    begin = phases.loc[steps, "start"].min() if steps.any() else samples["timestamp"].min()
    level = samples[run.measure.sample_column] if run.measure.sample_column else np.nan
    samples = samples.assign(t=samples["timestamp"] - begin, bytes=level)
    samples.loc[samples["t"] < 0, "bytes"] = np.nan
    phases = phases.assign(
        t_start=phases["start"] - begin,
        t_end=phases["end"] - begin,
        mark_bytes=phases[run.measure.phase_column].astype(float).where(steps),
    )
    highest = [highest_sample(samples, *span) for span in zip(phases["t_start"], phases["t_end"], strict=True)]
    # The device was read at the end of the phase; the kernel's and torch's high-water marks lie anywhere inside it.
    phases["mark_t"] = phases["t_end"] if run.measure is DEVICE_USED else [t for t, _ in highest]
    reached = np.fmax(phases["mark_bytes"].to_numpy(float), [level for _, level in highest])
    drawn = np.nanmax([0, *samples["bytes"], *reached])
    if run.peak_bytes is not None and drawn < run.peak_bytes and len(phases):
        named = steps & (phases["phase"] == run.peak_phase)
        candidates = np.where(named if named.any() else steps, np.nan_to_num(reached), -1)
        row = int(np.argmax(candidates))
        phases.loc[row, "mark_t"], phases.loc[row, "mark_bytes"] = highest[row][0], float(run.peak_bytes)
    return replace(run, samples=samples, phases=phases)


def highest_sample(samples: pd.DataFrame, start: float, end: float) -> tuple[float, float]:
    """Time and level of the phase's highest sample; the middle of the phase and NaN when it has none."""
    inside = samples.loc[samples["t"].between(start, end), ["t", "bytes"]].dropna()
    if inside.empty:
        return (start + end) / 2, np.nan
    return tuple(inside.loc[inside["bytes"].idxmax()])
