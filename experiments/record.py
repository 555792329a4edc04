"""run.json and summary.csv: the one writer of a run's facts."""

import csv
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from experiments.config import ROOT, ConfigError

SUMMARY_COLUMNS = (
    "run_id", "arm", "scale", "k", "repeat", "status", "device_kind", "device_name", "trl_version", "torch_version",
    "transformers_version", "commit", "prompt_tokens_requested", "prompt_tokens_fed_min", "prompt_tokens_fed_mean",
    "prompt_tokens_fed_max", "completion_tokens", "batch", "completions_per_forward", "steps", "seed", "budget_bytes",
    "start_bytes", "peak_device_used_bytes", "peak_process_device_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "peak_resident_bytes", "peak_phase", "step_seconds_median", "final_loss",
)  # fmt: skip
FINISHED = ("ok", "oom")  # a run with one of these need not be repeated; "error" and "running" are tried again


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
    device_total_bytes: int | None = None
    trl_version: str | None = None
    trl_file: str | None = None
    torch_version: str | None = None
    transformers_version: str | None = None
    python_version: str | None = None
    fork_patches: list[str] = field(default_factory=list)
    model: str | None = None
    model_parameters: int | None = None
    prompt_tokens_requested: int | None = None
    prompt_tokens_fed_min: int | None = None
    prompt_tokens_fed_mean: float | None = None
    prompt_tokens_fed_max: int | None = None
    completion_tokens: int | None = None
    batch: int | None = None
    completions_per_forward: int | None = None
    steps: int | None = None
    seed: int | None = None
    budget_bytes: int | None = None
    start_bytes: int | None = None
    peak_device_used_bytes: int | None = None
    peak_process_device_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None
    peak_phase: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    step_seconds_median: float | None = None
    trace: list[dict] = field(default_factory=list)
    final_loss: float | None = None
    sampler: dict | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / "run.json", vars(self))


def main_peak(record: dict) -> tuple[int, int]:
    """(peak, peak above the start level) of a finished run in its device's main measure, bytes."""
    peak = record["peak_device_used_bytes"] or record["peak_resident_bytes"]
    return peak, peak - record["start_bytes"]


def write_json(path: Path, value: dict) -> None:
    """Write through a temporary file: a reader sees the old or the new text, never half of one."""
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(staging, path)


def read_record(folder: Path) -> dict | None:
    """The run's record, or None where there is none that can be read."""
    try:
        return json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return None


def write_summary(machine: Path) -> list[dict]:
    """Write summary.csv (one row a run) and, for runs at scale `learn`, convergence/<arm>.csv. Returns the records.

    The curve of an arm is its first repeat's, with its usual completions a pass.
    """
    records = [record for path in sorted(machine.glob("*/run.json")) if (record := read_record(path.parent))]
    _write_csv(machine / "summary.csv", SUMMARY_COLUMNS, records)
    for record in records:
        if record["status"] == "ok" and record["run_id"] == f"{record['arm']}_learn_k{record['k']}_r0":
            rows = [{"arm": record["arm"], **step} for step in record["trace"]]
            (machine / "convergence").mkdir(exist_ok=True)
            _write_csv(machine / "convergence" / f"{record['arm']}.csv", ("step", "arm", "reward", "loss", "kl"), rows)
    return records


def _write_csv(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    staging = path.with_suffix(".tmp")
    with staging.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(staging, path)


def source_commit() -> str:
    """The commit of the code that runs, with a "-dirty" mark when experiments/, trl/ or the pins differ from it. In a
    copy without git, what SOURCE_COMMIT says."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "experiments", "trl", "requirements.lock").strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SOURCE_COMMIT", "unknown")
    return f"{commit}-dirty" if changed else commit


def make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --results") from error


def write_machine(machine: Path, record: RunRecord) -> None:
    from importlib.metadata import version

    facts = {
        "device_kind": record.device_kind,
        "device_name": record.device_name,
        "device_total_bytes": record.device_total_bytes,
        "cores": os.cpu_count(),
        "host_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "python_version": record.python_version,
        "torch_version": version("torch"),
        "transformers_version": version("transformers"),
    }
    write_json(machine / "machine.json", facts)
