"""Load the runs of a results folder: this project's layout (run.json, memory.csv, phases.csv) or the one of 2025."""

import re
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np
import pandas as pd

from visualization import legacy
from visualization.runs import (
    DEVICE_USED,
    DEVICE_WORDS,
    RESERVED,
    RESIDENT,
    LoadError,
    Measure,
    Run,
    read_csv,
    read_json,
)

SAMPLE_COLUMNS = (
    "timestamp",
    "elapsed_s",
    "device_used_bytes",
    "device_total_bytes",
    "device_utilization_percent",
    "process_device_bytes",
    "resident_bytes",
    "cpu_percent",
    "host_used_bytes",
)
PHASE_COLUMNS = (
    "phase",
    "step",
    "start",
    "end",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_resident_bytes",
    "device_used_bytes",
)
TEXT_FIELDS = (
    "run_id",
    "arm",
    "scale",
    "status",
    "device_kind",
    "device_name",
    "trl_version",
    "torch_version",
    "transformers_version",
    "commit",
    "peak_phase",
)
NUMBER_FIELDS = (
    "k",
    "repeat",
    "prompt_tokens_requested",
    "prompt_tokens_fed_mean",
    "completion_tokens",
    "batch",
    "budget_bytes",
    "start_bytes",
    "peak_device_used_bytes",
    "peak_reserved_bytes",
    "peak_resident_bytes",
    "step_seconds_median",
)
RERUN = "delete the run's folder and run it again"


def load(path: Path | str) -> tuple[Run, ...]:
    """Runs of a machine folder, of a folder in the 2025 layout, or of a combined 2025 CSV file. Raises LoadError."""
    path = Path(path)
    if path.is_dir() and not any(path.glob("*/run.json")) and legacy.log_files(path):
        return legacy.load_folder(path)
    return legacy.load_combined(path) if path.is_file() else load_machine(path)


def load_machine(folder: Path | str) -> tuple[Run, ...]:
    """Every run under results/<machine>, ordered by run id. Raises LoadError, also for an empty or missing folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise LoadError(f"{folder}: no such results folder; give one that the suite wrote, like results/<machine>")
    for path in sorted(folder.glob("*/memory.csv")):
        if not path.with_name("run.json").exists():
            raise LoadError(f"{path.with_name('run.json')}: the file is missing; {RERUN}")
    runs = tuple(load_run(path.parent) for path in sorted(folder.glob("*/run.json")))
    if not runs:
        raise LoadError(f"{folder}: holds no runs; run the suite first, or give the folder of another machine")
    return runs


def load_run(folder: Path) -> Run:
    """One run folder. The recorded peak of run.json is the truth that the curve must reach. Raises LoadError."""
    record_path = folder / "run.json"
    record = read_json(record_path, RERUN)
    run = run_from_record(record, record_path)
    sampler = record.get("sampler") or {}
    if not isinstance(sampler, dict):
        raise LoadError(f"{record_path}: sampler is {sampler!r}, not an object; {RERUN}")
    run = replace(
        run,
        error=run.error or record.get("error"),
        achieved_interval_s=_number(sampler.get("achieved_interval_s"), "achieved_interval_s", record_path),
        peak_missed_bytes=_number(sampler.get("peak_missed_bytes"), "peak_missed_bytes", record_path),
    )
    return _with_curve(
        run,
        _frame(folder / "memory.csv", SAMPLE_COLUMNS, run.status),
        _frame(folder / "phases.csv", PHASE_COLUMNS, run.status),
        record_path,
    )


def load_summary(folder: Path | str) -> tuple[Run, ...]:
    """The runs of results/<machine>/summary.csv, without samples and phases. Raises LoadError."""
    path = Path(folder) / "summary.csv"
    fields = read_csv(path, TEXT_FIELDS + NUMBER_FIELDS, "run the suite again to rewrite it", text_columns=TEXT_FIELDS)
    if fields.empty:
        raise LoadError(f"{path}: holds no runs; run the suite first")
    records = fields.astype(object).where(fields.notna(), None).to_dict("records")
    return tuple(run_from_record(record, path) for record in records)


def run_from_record(record: dict, where: Path) -> Run:
    """A Run without curve from the fields of run.json or of a summary row; `where` names the file in LoadError."""
    missing = [name for name in TEXT_FIELDS + NUMBER_FIELDS if name not in record]
    if missing:
        raise LoadError(f"{where}: lacks {', '.join(missing)}; {RERUN}")
    text = {name: str(record[name] or "") for name in TEXT_FIELDS}
    # A run id tells the completions a pass where they are not the arm's usual number: never the same cell
    if unusual := re.search(r"_c(\d+)_r\d+$", text["run_id"]):
        text["arm"] += f"-c{unusual[1]}"
    numbers = {name: _number(record[name], name, where) for name in NUMBER_FIELDS}
    if numbers["k"] is None or numbers["repeat"] is None:
        raise LoadError(f"{where}: k or repeat is empty; {RERUN}")
    if text["device_kind"] not in DEVICE_WORDS and (text["device_kind"] or text["status"] == "ok"):
        raise LoadError(f"{where}: device_kind is {text['device_kind']!r}, not cuda or cpu; {RERUN}")
    error = None
    if text["status"] == "running":
        text["status"], error = "error", "killed before it could report"
    if text["status"] not in ("ok", "oom", "error"):
        raise LoadError(f"{where}: status is {text['status']!r}, not ok, oom, error or running; {RERUN}")
    measure = _main_measure(text["device_kind"], numbers)
    peaks = {name: numbers.pop(name) for name in list(numbers) if name.startswith("peak_")}
    peak = peaks[measure.record_column] if text["status"] == "ok" else None
    if text["status"] == "ok" and peak is None:
        raise LoadError(f"{where}: status is ok but {measure.record_column} is empty; {RERUN}")
    k, repeat = int(numbers.pop("k")), int(numbers.pop("repeat"))
    return Run(
        k=k,
        repeat=repeat,
        measure=measure,
        samples=pd.DataFrame(),
        phases=pd.DataFrame(),
        error=error,
        peak_bytes=peak,
        **text,
        **numbers,
    )


def _main_measure(device_kind: str, numbers: dict) -> Measure:
    if device_kind != "cuda":
        return RESIDENT
    without_nvml = numbers["peak_device_used_bytes"] is None and numbers["peak_reserved_bytes"] is not None
    return RESERVED if without_nvml else DEVICE_USED


def _number(value: object, name: str, where: Path) -> float | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise LoadError(f"{where}: {name} is {value!r}, not a number; {RERUN}")
    return value


def _frame(path: Path, columns: tuple[str, ...], status: str) -> pd.DataFrame:
    """The CSV file; a run that failed early may have left none, or one without a complete line."""
    if status != "ok" and (not path.exists() or b"\n" not in path.read_bytes()):
        return pd.DataFrame({name: pd.Series(dtype=object if name == "phase" else float) for name in columns})
    return read_csv(path, columns, RERUN, text_columns=("phase",))


def _with_curve(run: Run, samples: pd.DataFrame, phases: pd.DataFrame, record_path: Path) -> Run:
    """Put samples and phases on one clock and one measure, and the recorded peak into its phase.

    Recorded peaks are those after loading, so the curve starts with the first step: loading has no `bytes`.
    """
    steps = phases["phase"] != "load"
    if run.status == "ok" and not steps.any():
        raise LoadError(f"{record_path.with_name('phases.csv')}: an ok run without a training phase; {RERUN}")
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
    highest = [_highest_sample(samples, *span) for span in zip(phases["t_start"], phases["t_end"], strict=True)]
    # The device was read at the end of the phase; the kernel's and torch's high-water marks lie anywhere inside it.
    phases["mark_t"] = phases["t_end"] if run.measure is DEVICE_USED else [t for t, _ in highest]
    reached = np.fmax(phases["mark_bytes"].to_numpy(float), [level for _, level in highest])
    drawn = np.nanmax([0, *samples["bytes"], *reached])
    if run.peak_bytes is not None and drawn > run.peak_bytes:
        raise LoadError(
            f"{record_path}: {run.measure.record_column} is {run.peak_bytes:.0f} bytes, but memory.csv or "
            f"phases.csv reach {drawn:.0f}; {RERUN}"
        )
    if run.peak_bytes is not None and drawn < run.peak_bytes:
        named = steps & (phases["phase"] == run.peak_phase)
        candidates = np.where(named if named.any() else steps, np.nan_to_num(reached), -1)
        row = int(np.argmax(candidates))
        phases.loc[row, "mark_t"], phases.loc[row, "mark_bytes"] = highest[row][0], float(run.peak_bytes)
    return replace(run, samples=samples, phases=phases)


def _highest_sample(samples: pd.DataFrame, start: float, end: float) -> tuple[float, float]:
    """Time and level of the phase's highest sample; the middle of the phase and NaN when it has none."""
    inside = samples.loc[samples["t"].between(start, end), ["t", "bytes"]].dropna()
    if inside.empty:
        return (start + end) / 2, np.nan
    return tuple(inside.loc[inside["bytes"].idxmax()])
