"""Runs of the launcher, made into corrections for the machine that they ran on.

    rloo-memory plan --calibrate RUN_DIR... [--out FILE]

RUN_DIR is an output folder of the launcher: memory.json has the predicted peaks, memory_phases.csv the measured ones.
Of these the steps after the first update count, as the planner predicts a step with the optimizer's state.
"""

import csv
import datetime
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rloo_memory.errors import ConfigError
from rloo_memory.models import typed_line
from rloo_memory.plan.accuracy.calibration import (
    MATTERS,
    Calibration,
    Spread,
    as_json,
    file_of,
    minor,
)
from rloo_memory.plan.options import check_writable
from rloo_memory.sizes import GIB
from rloo_memory.storage import write_json

PHASES = ("generate", "score", "train", "optimizer")
FULL = 0.9  # of the planned tokens, that a run must have seen: its peaks are then those that were predicted
FRESH_CONTEXT = 2**30  # bytes: on CUDA more than a new context takes, so that others are on the device
MEASURE = {
    "cuda": "what torch has allocated",
    "cpu": "what the process holds above its level before the model",
}
MEANS = {
    ("context", "cuda"): "the device's use less what torch has reserved",
    ("reserve", "cuda"): "what torch has reserved beyond the highest peak",
    ("context", "cpu"): "the process before the model is loaded",
}


class LeftOut(Exception):
    """Why a run says nothing about the planner's errors; its text goes on after "RUN_DIR is left out: it "."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run's phases in the planner's measure, predicted and measured, and what else its device held; bytes."""

    folder: str
    started: str  # unix seconds; no two runs have the same
    machine: str
    device_kind: str
    device_name: str
    versions: dict[str, str]
    predicted: dict[str, int]
    measured: dict[str, int]
    context: int | None
    reserve: int | None

    @property
    def predicted_peak(self) -> int:
        return max(self.predicted.values())


def measured_run(folder: Path) -> MeasuredRun:
    """Raises `ConfigError` for what is no run's folder, `LeftOut` for a run that does not count."""
    if not (folder / "memory.json").is_file():
        raise ConfigError(f"{folder} holds no memory.json; name output folders of the launcher")
    try:
        record = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
        reason = why_not(record)
        if reason is None:
            with (folder / "memory_phases.csv").open(newline="", encoding="utf-8") as file:
                return from_record(str(folder), record, list(csv.DictReader(file)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LeftOut(f"is not a whole record ({typed_line(error)}); train again") from error
    raise LeftOut(reason)


def why_not(record: dict) -> str | None:
    """Why the measured peaks of a run are not those that were predicted; None where they are."""
    if "start_bytes" not in record or "machine" not in record:
        return "was recorded by an older version, without the level before the model; train again"
    if not record["predicted_peaks"]:
        return "has no predictions; train with --predict_memory true, from the launcher"
    if record["out_of_memory"]:
        return f"ran out of memory in phase {record['out_of_memory']}, so its peaks are not whole"
    if record["start_bytes"] is None:
        return "does not say what was in use before the model; train with the launcher"
    if record["arguments"].get("use_vllm"):
        return "generated with vLLM, whose share of the device no factor scales"
    for what, seen, planned in (
        ("prompts", record["prompt_tokens"], record["predicted_prompt_tokens"]),
        ("completions", record["completion_tokens"], record["arguments"]["max_completion_length"]),
    ):
        if seen is None or seen < FULL * planned:
            return (
                f"was predicted for {what} of {planned} tokens and saw {seen}, less than {FULL:.0%}; train longer, or "
                "on data that is as long"
            )


def from_record(folder: str, record: dict, rows: list[dict]) -> MeasuredRun:
    first = next((i for i, row in enumerate(rows) if row["phase"] == "optimizer"), len(rows))
    steady = rows[first + 1 :]
    if not any(row["phase"] == "optimizer" for row in steady):
        raise LeftOut("has no whole second update, and the optimizer has its state from then on; train two or more")
    cuda, start = record["device_kind"] == "cuda", record["start_bytes"]
    column, below = ("peak_allocated_bytes", 0) if cuda else ("peak_resident_bytes", start)
    measured = {
        phase: max(int(row[column]) for row in steady if row["phase"] == phase) - below
        for phase in PHASES
        if phase in record["predicted_peaks"] and any(row["phase"] == phase for row in steady)
    }
    predicted = {phase: record["predicted_peaks"][phase] for phase in measured}
    context, reserve = start, None
    if cuda:
        context, reserve = None, highest(rows, "peak_reserved_bytes") - highest(rows, "peak_allocated_bytes")
        if start <= FRESH_CONTEXT:
            context = max(int(row["device_used_bytes"]) - int(row["peak_reserved_bytes"]) for row in steady)
    return MeasuredRun(
        folder,
        rows[0]["start"],
        *(record[name] for name in ("machine", "device_kind", "device_name", "versions")),
        predicted,
        measured,
        context,
        reserve,
    )


def highest(rows: list[dict], column: str) -> int:
    return max(int(row[column]) for row in rows if row["phase"] in PHASES)


def measured_runs(folders: list[Path]) -> list[MeasuredRun]:
    """Those that count, each once; the others are named on stderr. Raises `ConfigError` where none counts, and for
    runs that do not belong together."""
    runs, left = {}, []
    for folder in dict.fromkeys(folders):
        try:
            run = measured_run(folder)
            runs.setdefault(run.started, run)
        except LeftOut as reason:
            left.append(f"{folder} is left out: it {reason}")
    if not runs:
        raise ConfigError(f"no run that can be calibrated with: {'; '.join(left)}")
    for line in left:
        print(f"plan: {line}", file=sys.stderr)
    found = list(runs.values())
    belong("machines", {run.folder: f"{run.machine} ({run.device_name})" for run in found})
    for package in MATTERS:
        belong(f"versions of {package}", {run.folder: minor(run.versions[package]) for run in found})
    return found


def belong(what: str, values: dict[str, str]) -> None:
    """Raises `ConfigError` where the values of some runs, by folder, are not the same."""
    if len(set(values.values())) > 1:
        first = {value: folder for folder, value in reversed(values.items())}
        named = ", ".join(f"{folder} is of {value}" for value, folder in reversed(first.items()))
        raise ConfigError(f"runs of different {what}: {named}; calibrate each by itself")


def calibration_of(runs: list[MeasuredRun]) -> Calibration:
    ratios = {
        phase: [run.measured[phase] / run.predicted[phase] for run in runs if phase in run.measured]
        for phase in PHASES
    }
    peaks = [run.predicted_peak for run in runs]
    return Calibration(
        runs[0].machine,
        runs[0].device_kind,
        runs[0].device_name,
        datetime.date.today().isoformat(),
        {package: runs[0].versions[package] for package in MATTERS},
        tuple({"folder": run.folder, "started": run.started, "versions": run.versions} for run in runs),
        {phase: found for phase, values in ratios.items() if (found := spread_of(values))},
        (min(peaks), max(peaks)),
        spread_of([run.context for run in runs if run.context is not None]),
        spread_of([run.reserve for run in runs if run.reserve is not None]),
    )


def spread_of(values: list[float]) -> Spread | None:
    return Spread(min(values), median(values), max(values), len(values)) if values else None


def calibrate(folders: list[Path], out: Path | None) -> int:
    """The command: a table of the runs, and the file. Returns the exit code; raises `ConfigError`."""
    if out:
        check_writable(out)
    runs = measured_runs(folders)
    calibration = calibration_of(runs)
    path = out or file_of(calibration.machine)
    if not out:
        make_folder(path.parent)
        check_writable(path)
    print(table(runs))
    print(in_words(calibration))
    replaced = " (replaced)" if path.exists() else ""
    write_json(path, as_json(calibration))
    print(f"{replace(calibration, file=str(path)).in_words()}{replaced}")
    own = "on this machine" if path == file_of(calibration.machine) else f"with --calibration {path}"
    print(f"used by planner and doctor with --calibration {path}, by the launcher {own}")
    return 0


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; name another file with --out") from error


def table(runs: list[MeasuredRun]) -> str:
    """One line a run and phase, GiB."""
    wide = max(len("run"), *(len(run.folder) for run in runs))
    lines = [f"{'run':{wide}}  {'phase':9} {'predicted':>10} {'measured':>10} {'measured/predicted':>19}"]
    for run in runs:
        for phase, size in run.measured.items():
            expected = run.predicted[phase]
            cells = f"{expected / GIB:10.3f} {size / GIB:10.3f} {size / expected:19.3f}"
            lines.append(f"{run.folder:{wide}}  {phase:9} {cells}")
    return "\n".join(lines)


def in_words(calibration: Calibration) -> str:
    """What the numbers of the table mean, and the two that are not in it."""
    lines = [f"GiB; measured is {MEASURE[calibration.device_kind]}, from the second update on"]
    for name, found in (("context", calibration.context), ("reserve", calibration.reserve)):
        if found:
            low, expected, high = (size / GIB for size in (found.low, found.expected, found.high))
            lines.append(f"{name} {expected:.2f} ({low:.2f} to {high:.2f}): {MEANS[name, calibration.device_kind]}")
    if calibration.context is None:
        lines.append("context not known: other processes were on the device before the model was loaded")
    return "\n".join(lines)
