"""A run as files: its record (run.json), its phases (phases.csv), its samples (memory.csv), and the file that keeps
records and phases of all runs of a machine (runs.jsonl). Who measures and who shows read this declaration."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.phases import PHASE_COLUMNS

SAMPLE_COLUMNS = (
    "timestamp", "elapsed_s", "device_used_bytes", "device_total_bytes", "device_utilization_percent",
    "process_device_bytes", "resident_bytes", "cpu_percent", "host_used_bytes",
)  # fmt: skip
FINISHED = ("ok", "oom")  # a run with one of these need not be repeated; "error" and "running" are tried again
RUNS = "runs.jsonl"
APART = 1.5  # seconds of repeats on a quiet machine stay within this factor


@dataclass
class RunRecord:
    """What is known of one run. Written when the run starts and again when it ends, so that a kill leaves a trace.

    Sizes in bytes, times in seconds, None where a value does not exist.
    """

    run_id: str
    arm: str
    scale: str
    k: int
    repeat: int
    config: dict
    commit: str
    status: str = "running"
    error: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    started_at: str | None = None
    finished_at: str | None = None
    device_kind: str | None = None
    device_name: str | None = None
    trl_version: str | None = None
    trl_file: str | None = None
    torch_version: str | None = None
    transformers_version: str | None = None
    fork_patches: list[str] = field(default_factory=list)
    model: str | None = None
    prompt_tokens_requested: int | None = None
    prompt_tokens_fed_min: int | None = None
    prompt_tokens_fed_mean: float | None = None
    prompt_tokens_fed_max: int | None = None
    completion_tokens: int | None = None
    batch: int | None = None
    budget_bytes: int | None = None
    start_bytes: int | None = None
    peak_device_used_bytes: int | None = None
    peak_process_device_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None
    peak_phase: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    trace: list[dict] = field(default_factory=list)
    sampler: dict | None = None


@dataclass(frozen=True)
class StoredRun:
    """A run of a machine's folder. `record` is a `RunRecord` as a dictionary; `phases` are the rows of phases.csv, by
    its columns; `folder` is where its samples lie, if they are on this machine."""

    run_id: str
    record: dict
    phases: tuple[dict, ...] = ()
    folder: Path | None = None

    @property
    def finished(self) -> bool:
        return self.record["status"] in FINISHED


def main_peak(record: dict) -> tuple[int, int]:
    """(peak, peak above the start level) of a finished run in its device's main measure, bytes."""
    peak = record["peak_device_used_bytes"] or record["peak_resident_bytes"]
    return peak, peak - record["start_bytes"]


def read_record(folder: Path) -> dict | None:
    """The record in a run's folder, None where there is none."""
    path = folder / "run.json"
    return record_of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def record_of(values: dict) -> dict:
    """All fields of a record, from those that were written."""
    names = {declared.name for declared in fields(RunRecord)}
    return vars(RunRecord(**{name: value for name, value in values.items() if name in names}))


def read_rows(path: Path) -> Iterator[dict]:
    """The whole rows of a CSV file of numbers, of which `phase` alone is text; None where a cell is empty. No rows
    where there is no such file; a last line that a kill has cut is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        yield {name: cell if name == "phase" else float(cell) if cell else None for name, cell in row.items()}


def kept_runs(machine: Path) -> dict[str, StoredRun]:
    """The runs of runs.jsonl by run id. Raises `ConfigError` for a line that git or another program has put there."""
    path, found = machine / RUNS, {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            kept = json.loads(line)
            record = kept["record"]
            record_of(record)  # has what every record has
            phases = tuple(dict(zip(PHASE_COLUMNS, row, strict=True)) for row in kept["phases"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path}: line {number} is no run ({type(error).__name__}: {error}); take the file as it was committed"
            ) from error
        found[record["run_id"]] = StoredRun(record["run_id"], record, phases)
    return found


def stored_runs(machine: Path) -> list[StoredRun]:
    """Every run of results/<machine>, by run id: those of runs.jsonl, and in their place those with a folder here,
    but nothing unfinished in the place of what is finished."""
    found = kept_runs(machine)
    for folder in (path.parent for path in machine.glob("*/run.json")):
        run = StoredRun(folder.name, read_record(folder), tuple(read_rows(folder / "phases.csv")), folder)
        if run.finished or run.run_id not in found or not found[run.run_id].finished:
            found[run.run_id] = run
    return [found[run_id] for run_id in sorted(found)]
