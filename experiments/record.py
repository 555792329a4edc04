"""run.json and summary.csv: the one writer of a run's facts.

    python -m experiments.record results/<machine>

writes summary.csv (and, for runs at scale `learn`, convergence/<arm>.csv) from the run folders as they are now. Both
are exports for other programs: nothing here reads them.
"""

import contextlib
import csv
import errno
import io
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from experiments.run_options import Parser, directory
from rloo_memory.arms import ARMS
from rloo_memory.errors import DISK_FULL, ConfigError, exit_code, shown
from rloo_memory.sizes import GIB
from rloo_memory.storage import read_json, replace_text, write_json

SUMMARY_COLUMNS = (
    "run_id", "arm", "scale", "k", "repeat", "status", "device_kind", "device_name", "trl_version", "torch_version",
    "transformers_version", "commit", "prompt_tokens_requested", "prompt_tokens_fed_min", "prompt_tokens_fed_mean",
    "prompt_tokens_fed_max", "completion_tokens", "batch", "completions_per_forward", "steps", "seed", "budget_bytes",
    "start_bytes", "peak_device_used_bytes", "peak_process_device_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "peak_resident_bytes", "peak_phase", "step_seconds_median", "final_loss",
)  # fmt: skip
FINISHED = ("ok", "oom")  # a run with one of these need not be repeated; "error" and "running" are tried again
STATUSES = (*FINISHED, "error", "running")


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
    launch: str | None = None  # which launch wrote this: see `processes.Launch`

    def write(self, folder: Path) -> None:
        write_json(folder / "run.json", vars(self))

    def write_end(self, folder: Path) -> None:
        """Replace what `write` left when the run started. Where the disk is full, the record becomes an error that
        says so, without the trace, written over the old one's place. Raises OSError where the folder is gone, or is
        another launch's by now, or cannot be written at all."""
        before = read_json(folder / "run.json")
        if not isinstance(before, dict) or before.get("launch") != self.launch:
            raise FileNotFoundError(errno.ENOENT, "the run's folder was removed or replaced meanwhile")
        try:
            self.write(folder)
        except OSError as error:
            self.status, self.exit_code, self.error = "error", 1, no_room(error, folder)
            self.trace, self.step_seconds = [], []
            with (folder / "run.json").open("r+") as file:
                file.write(json.dumps(vars(self)) + "\n")
                file.truncate()


def no_room(error: OSError, folder: Path) -> str:
    """An error of writing in words, with what to do about it."""
    if error.errno in DISK_FULL:
        return f"the disk of {error.filename or folder} is full ({error.strerror}); make room and run again"
    return f"cannot write to {folder}: {error.strerror}"


def main_peak(record: dict) -> tuple[int, int]:
    """(peak, peak above the start level) of a finished run in its device's main measure, bytes."""
    peak = record["peak_device_used_bytes"] or record["peak_resident_bytes"]
    return peak, peak - record["start_bytes"]


def outcome(record: dict) -> str:
    """How a run ended, in words, GiB and tokens; also what its peak rests on where the sampler did not last."""
    if record["status"] == "oom":
        return "OUT OF MEMORY"
    if record["status"] != "ok":
        return f"FAILED: {record['error']}"
    peak, above = (size / GIB for size in main_peak(record))
    fed = record.get("prompt_tokens_fed_mean")
    text = f"peak {peak:.2f} GiB, {above:.2f} above start" + (f", {fed:.0f} prompt tokens" if fed else "")
    sampler = record.get("sampler") or {}
    if "lost_after_s" in sampler:
        text += f"; SAMPLER LOST after {sampler['lost_after_s']:.1f} s, the peak is from {sampler.get('peak_from')}"
    return text


def fill_peaks(record: RunRecord, phases, folder: Path, report) -> None:
    """Peaks after loading: the larger of what was sampled (memory.csv in `folder`) and what torch or the kernel
    counted (a `PhaseRecorder`). `report` is the sampler's `IntervalReport`, None where the sampler was lost."""
    from experiments.memory_monitor import interval_report  # here, as reading records needs no NVML

    every = read_samples(folder / "memory.csv")
    steps = [peak for peak in phases.peaks if peak.phase != "load"]
    rows = [row for row in every if steps and (row["timestamp"] or 0) >= steps[0].start]

    def sampled(column: str) -> int | None:
        return max((int(row[column]) for row in rows if row.get(column) is not None), default=None)

    def counted(column: str) -> int | None:
        return max((value for peak in steps if (value := getattr(peak, column)) is not None), default=None)

    def larger(*values: int | None) -> int | None:
        return max((value for value in values if value is not None), default=None)

    record.peak_allocated_bytes = counted("peak_allocated_bytes")
    record.peak_reserved_bytes = counted("peak_reserved_bytes")
    record.peak_resident_bytes = larger(counted("peak_resident_bytes"), sampled("resident_bytes"))
    record.peak_process_device_bytes = sampled("process_device_bytes")
    column, source = "peak_resident_bytes", "the kernel's high-water mark"
    seen, main = sampled("resident_bytes"), record.peak_resident_bytes
    if record.device_kind == "cuda" and steps:
        # NVML has no peak counter: torch's pool at its peak, plus what the device held besides the pool at the start
        with_pool = record.peak_reserved_bytes + phases.outside_pool_bytes
        seen = sampled("device_used_bytes")
        record.peak_device_used_bytes = main = larger(seen, counted("device_used_bytes"), with_pool)
        column, source = "peak_allocated_bytes", "torch's counters"
    known = [peak for peak in steps if getattr(peak, column) is not None]
    if known:
        record.peak_phase = max(known, key=lambda peak: getattr(peak, column)).phase
    record.sampler = dict(
        vars(report or interval_report([row["elapsed_s"] for row in every], record.config["interval"]))
    )
    record.sampler["peak_missed_bytes"] = max(main - seen, 0) if main is not None and seen is not None else None
    if report is None:
        record.sampler["lost_after_s"] = max((row["elapsed_s"] for row in every), default=0.0)
        record.sampler["peak_from"] = source if known else None


def read_samples(path: Path) -> list[dict[str, float | None]]:
    """The whole rows of a memory.csv as numbers, None where a cell is empty; no rows where there is no such file."""
    rows = []
    with contextlib.suppress(OSError), path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(TypeError, ValueError):  # the last row of a full disk
                rows.append({name: float(cell) if cell != "" else None for name, cell in row.items()})
    return rows


def read_record(folder: Path) -> dict | None:
    """The run's record, or None where there is none that can be used: see `damage`."""
    record = read_json(folder / "run.json")
    return None if damage(record, folder) else record


def damage(record, folder: Path) -> str | None:
    """What keeps the value of run.json in `folder` from being that run's record; None where it is one."""
    if not isinstance(record, dict):
        return "is no record"
    for names, kind in ((("run_id", "arm", "scale", "status", "commit"), str), (("k", "repeat"), int)):
        for name in names:
            if type(record.get(name)) is not kind:
                return f"has no {name}"
    if record["k"] < 1 or record["repeat"] < 0:
        return f"has k {shown(record['k'])} and repeat {shown(record['repeat'])}"
    if record["run_id"] != folder.name:
        return f"is the record of {shown(record['run_id'])}"
    if record["status"] not in STATUSES:
        return f"has the status {shown(record['status'])}"
    if not isinstance(record.get("config"), dict) or not isinstance(record.get("trace"), list):
        return "has no config or no trace"
    if record["status"] == "ok":
        used = record.get("peak_device_used_bytes") or record.get("peak_resident_bytes")
        for name, value in (("peak", used), ("start_bytes", record.get("start_bytes"))):
            if type(value) not in (int, float) or not 0 < value < 2**60:
                return f"is of a finished run and its {name} is {shown(value)}"
        fed = record.get("prompt_tokens_fed_mean")
        if fed is not None and (type(fed) not in (int, float) or not 0 <= fed < 2**60):
            return f"has prompt_tokens_fed_mean {shown(fed)}"
    sampler = {} if record.get("sampler") is None else record["sampler"]
    lost = sampler.get("lost_after_s", 0.0) if isinstance(sampler, dict) else None
    if type(lost) not in (int, float) or not 0 <= lost < 2**60:
        return "has a damaged sampler"
    return None


def write_summary(machine: Path) -> list[dict]:
    """Write summary.csv (one row a run) and, for runs at scale `learn`, convergence/<arm>.csv. Returns the records.

    The curve of an arm is its first repeat's, with its usual completions a pass. A run.json that is no record is left
    out and named on stderr. Raises OSError.
    """
    records = []
    for path in sorted(machine.glob("*/run.json")):
        record = read_json(path)
        if wrong := damage(record, path.parent):
            print(f"{path} {wrong}; it is left out: delete that folder and run it again", file=sys.stderr)
        else:
            records.append(record)
    if records or (machine / "summary.csv").exists():  # nothing was run: nothing to leave
        write_csv(machine / "summary.csv", SUMMARY_COLUMNS, records)
    for arm in ARMS:
        path = machine / "convergence" / f"{arm}.csv"
        learnt = [r for r in records if r["status"] == "ok" and r["run_id"] == f"{arm}_learn_k{r['k']}_r0"]
        if learnt:
            path.parent.mkdir(exist_ok=True)
            rows = [{"arm": arm, **step} for step in learnt[-1]["trace"] if isinstance(step, dict)]
            write_csv(path, ("step", "arm", "reward", "loss", "kl"), rows)
        else:
            path.unlink(missing_ok=True)
    return records


def write_csv(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    """Write through a temporary file, as `write_json` does; what is not in `columns` is left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())


def make_writable(folder: Path) -> None:
    """Make `folder` if need be and try to write there. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / ".probe", "x")
        (folder / ".probe").unlink(missing_ok=True)  # another process may try as well
    except OSError as error:
        raise ConfigError(f"{no_room(error, folder)}; choose another --results") from error


def write_machine(machine: Path, record: RunRecord) -> None:
    """machine.json: what this machine is, and the versions that the last run on it used."""
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


def main(argv: list[str] | None = None) -> int:
    return exit_code("record", _export, argv)


def _export(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.record", description="Write summary.csv from the run folders.")
    parser.add_argument("machine", type=directory, nargs="+", help="a folder of run folders: results/<machine>")
    for machine in parser.parse_args(argv).machine:
        if not (machine / "summary.csv").exists() and not any(machine.glob("*/run.json")):
            raise ConfigError(f"{machine} holds no runs; name a folder that experiments.suite wrote")
        try:
            records = write_summary(machine)
        except OSError as error:
            raise ConfigError(no_room(error, machine)) from None
        print(f"{machine / 'summary.csv'}: {len(records)} run(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
