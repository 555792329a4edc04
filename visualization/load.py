"""Load the runs of a results folder: this project's layout (run.json, memory.csv, phases.csv) or the one of 2025.

Nothing else is read: summary.csv and convergence/*.csv are exports. Every run folder gives one Run. One that cannot be
used gives a Run of status `damaged` in its place, so that the others are still drawn and the gap has a name.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from visualization import legacy
from visualization.files import LoadError, read_csv, read_json
from visualization.runs import DEVICE_USED, DEVICE_WORDS, LEARN, RESERVED, RESIDENT, TIMES, Measure, Run

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
MAX_BYTES = 2**50
MAX_SECONDS = 10**10
# Name in run.json -> the smallest and the largest value that can be true: tokens, bytes, seconds
NUMBER_FIELDS = {
    "k": (2, 10**6),
    "repeat": (0, 10**6),
    "prompt_tokens_requested": (0, 10**9),
    "prompt_tokens_fed_mean": (0, 10**9),
    "completion_tokens": (0, 10**9),
    "batch": (1, 10**9),
    "budget_bytes": (1, MAX_BYTES),
    "start_bytes": (0, MAX_BYTES),
    "peak_device_used_bytes": (0, MAX_BYTES),
    "peak_allocated_bytes": (0, MAX_BYTES),
    "peak_reserved_bytes": (0, MAX_BYTES),
    "peak_resident_bytes": (0, MAX_BYTES),
    "step_seconds_median": (0, MAX_SECONDS),
}
SAMPLER_FIELDS = {"achieved_interval_s": (0, MAX_SECONDS), "peak_missed_bytes": (0, MAX_BYTES)}
TRACE_FIELDS = ("step", "reward", "loss", "kl")
RERUN = "delete the run's folder and run it again"
# What the suite calls a run's folder; damaged folders have nothing else to say what they were
RUN_ID = re.compile(r"(?P<arm>.+)_(?P<scale>[^_]+)_k(?P<k>\d{1,6})(?:_c(?P<passes>\d{1,6}))?_r(?P<repeat>\d{1,6})")


def load(path: Path | str) -> tuple[Run, ...]:
    """Runs of a machine folder, of a folder in the 2025 layout, or of a combined 2025 CSV file. Raises LoadError."""
    path = Path(path)
    if path.is_dir() and not any(path.glob("*/run.json")) and legacy.log_files(path):
        return legacy.load_folder(path)
    return legacy.load_combined(path) if path.is_file() else load_machine(path)


def load_machine(folder: Path | str) -> tuple[Run, ...]:
    """Every run under results/<machine>, ordered by run id, damaged ones included.

    Raises LoadError for a missing or empty folder, and where not one run can be used."""
    folder = Path(folder)
    if not folder.is_dir():
        raise LoadError(f"{folder}: no such results folder; give one that the suite wrote, like results/<machine>")
    folders = sorted({path.parent for name in ("run.json", "memory.csv") for path in folder.glob(f"*/{name}")})
    if not folders:
        raise LoadError(f"{folder}: holds no runs; run ./run_baseline-rloo.sh first, or give another machine's folder")
    runs = tuple(_load_or_name(path) for path in folders)
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


def _load_or_name(folder: Path) -> Run:
    try:
        return load_run(folder)
    except LoadError as error:
        named = RUN_ID.fullmatch(folder.name)
        arm = folder.name if not named else named["arm"] + (f"-c{named['passes']}" if named["passes"] else "")
        return Run(
            run_id=folder.name,
            arm=arm,
            scale=named["scale"] if named else "",
            k=int(named["k"]) if named else 0,
            repeat=int(named["repeat"]) if named else 0,
            status="damaged",
            device_kind="",
            device_name="",
            measure=RESIDENT,
            samples=_empty(SAMPLE_COLUMNS + ("t", "bytes")),
            phases=_empty(PHASE_COLUMNS + ("t_start", "t_end", "mark_t", "mark_bytes")),
            error=str(error),
        )


def load_run(folder: Path) -> Run:
    """One run folder. The recorded peak of run.json is the truth that the curve must reach. Raises LoadError."""
    record_path = folder / "run.json"
    record = read_json(record_path, RERUN)
    run = _from_record(record, record_path)
    if run.run_id != folder.name:
        raise LoadError(f"{record_path}: run_id is {_shown(run.run_id)}, not the folder's name; {RERUN}")
    whole = run.status == "ok" and not run.sampler_lost
    samples = _frame(folder / "memory.csv", SAMPLE_COLUMNS, ("timestamp",), whole)
    phases = _frame(folder / "phases.csv", PHASE_COLUMNS, ("step", "start", "end"), run.status == "ok")
    if whole and samples.empty:
        raise LoadError(f"{folder / 'memory.csv'}: an ok run without a sample; {RERUN}")
    backwards = phases["end"] < phases["start"]
    if backwards.any():
        line = int(backwards.idxmax()) + 2
        raise LoadError(f"{folder / 'phases.csv'}: line {line}, the phase ends before it starts; {RERUN}")
    return _with_curve(run, samples, phases, record_path)


def _from_record(record: dict, where: Path) -> Run:
    """A Run without curve from the fields of run.json; `where` names the file in LoadError."""
    missing = [name for name in (*TEXT_FIELDS, *NUMBER_FIELDS) if name not in record]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LoadError(f"{where}: lacks {', '.join(missing[:3])}{more}; {RERUN}")
    text = {name: _text(record[name], name, where) for name in TEXT_FIELDS}
    numbers = {name: _number(record[name], name, *limits, where) for name, limits in NUMBER_FIELDS.items()}
    for name in ("run_id", "arm", "scale", "k", "repeat"):
        if {**text, **numbers}[name] in ("", None):
            raise LoadError(f"{where}: {name} is empty; {RERUN}")
    for name in ("k", "repeat"):
        if numbers[name] != int(numbers[name]):
            raise LoadError(f"{where}: {name} is {numbers[name]!r}, not a whole number; {RERUN}")
    # A run id tells the completions a pass where they are not the arm's usual number: never the same cell
    if unusual := re.search(r"_c(\d+)_r\d+$", text["run_id"]):
        text["arm"] += f"-c{unusual[1]}"
    if text["device_kind"] not in DEVICE_WORDS and (text["device_kind"] or text["status"] == "ok"):
        raise LoadError(f"{where}: device_kind is {text['device_kind']!r}, not cuda or cpu; {RERUN}")
    error = record.get("error")
    if text["status"] == "running":
        text["status"], error = "killed", "killed before it could report"
    if text["status"] not in ("ok", "oom", "error", "killed"):
        raise LoadError(f"{where}: status is {text['status']!r}, not ok, oom, error or running; {RERUN}")
    measure = _main_measure(text["device_kind"], numbers)
    peaks = {name: numbers.pop(name) for name in list(numbers) if name.startswith("peak_")}
    peak = peaks[measure.record_column]
    ok = text["status"] == "ok"
    if ok and peak is None:
        raise LoadError(f"{where}: status is ok but {measure.record_column} is empty; {RERUN}")
    if ok and numbers["start_bytes"] is not None and numbers["start_bytes"] > peak:
        raise LoadError(
            f"{where}: start_bytes is {numbers['start_bytes']:.0f}, above {measure.record_column}, {peak:.0f}; {RERUN}"
        )
    k, repeat = int(numbers.pop("k")), int(numbers.pop("repeat"))
    sampler = record.get("sampler")
    if not isinstance(sampler, dict | None):
        raise LoadError(f"{where}: sampler is {_shown(sampler)}, not an object; {RERUN}")
    told = {name: _number((sampler or {}).get(name), name, *limits, where) for name, limits in SAMPLER_FIELDS.items()}
    return Run(
        k=k,
        repeat=repeat,
        measure=measure,
        samples=pd.DataFrame(),
        phases=pd.DataFrame(),
        error=error,
        peak_bytes=peak if ok else None,
        peaks=peaks if ok else {},
        sampler_lost=_sampler_lost(sampler, ok, where),
        trace=_trace(record.get("trace"), where) if text["scale"] == LEARN else (),
        **text,
        **numbers,
        **told,
    )


def _sampler_lost(sampler: dict | None, ok: bool, where: Path) -> str:
    """When the sampler was lost, in words, or "". A finished run without the sampler's report lost it, too."""
    after = _number((sampler or {}).get("lost_after_s"), "lost_after_s", 0, MAX_SECONDS, where)
    if after is not None:
        source = _text(sampler.get("peak_from"), "peak_from", where)
        return f"after {after:.0f} s" + (f", peak from {source}" if source else "")
    return "nobody knows when" if ok and sampler is None else ""


def _trace(trace: object, where: Path) -> tuple[dict, ...]:
    """Step, reward, loss and KL of each update; NaN is a value that a training can reach."""
    if not isinstance(trace, list) or not all(isinstance(step, dict) for step in trace):
        raise LoadError(f"{where}: trace is no list of objects; {RERUN}")
    for step in trace:
        for name in TRACE_FIELDS:
            value = step.get(name)
            if value == value:  # not NaN
                _number(value, f"trace: {name}", -1e300, 1e300, where)
    return tuple({name: step.get(name) for name in TRACE_FIELDS} for step in trace)


def _main_measure(device_kind: str, numbers: dict) -> Measure:
    if device_kind != "cuda":
        return RESIDENT
    without_nvml = numbers["peak_device_used_bytes"] is None and numbers["peak_reserved_bytes"] is not None
    return RESERVED if without_nvml else DEVICE_USED


def _text(value: object, name: str, where: Path) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value.isprintable():
        raise LoadError(f"{where}: {name} is {_shown(value)}, not a line of text; {RERUN}")
    return value


def _number(value: object, name: str, low: float, high: float, where: Path) -> float | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise LoadError(f"{where}: {name} is {_shown(value)}, not a number; {RERUN}")
    if not low <= value <= high:
        raise LoadError(f"{where}: {name} is {_shown(value)}, outside {low:,} to {high:,}; {RERUN}")
    return value


def _shown(value: object) -> str:
    """The value as Python writes it, cut where it is longer than a line has room for."""
    text = repr(value)
    return text if len(text) <= 40 else text[:36] + " ..."


def _empty(columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=object if name == "phase" else float) for name in columns})


def _frame(path: Path, columns: tuple[str, ...], required: tuple[str, ...], whole: bool) -> pd.DataFrame:
    """The CSV file; of a run that is not `whole` it may be missing, or without a complete line."""
    if not whole and (not path.exists() or b"\n" not in path.read_bytes()):
        return _empty(columns)
    frame = read_csv(path, columns, RERUN, text_columns=("phase",))
    for name in (name for name in columns if name != "phase"):
        high = MAX_BYTES if name.endswith("_bytes") else MAX_SECONDS
        bad = ~frame[name].between(0, high)
        if name not in required:
            bad &= frame[name].notna()
        if bad.any():
            row = int(bad.idxmax())
            raise LoadError(f"{path}: line {row + 2}, {name}: {frame[name][row]} is outside 0 to {high:,}; {RERUN}")
    return frame


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
