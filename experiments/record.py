"""The one writer of a run's facts: run.json, and runs.jsonl of all runs.

    python -m experiments.record results/<machine>

writes runs.jsonl from the run folders as they are now. Runs that have no folder here stay in it as they are.
"""

import csv
import errno
import io
import json
import sys
from pathlib import Path

from experiments.config import RunConfig
from experiments.run_options import Parser, directory
from experiments.run_record import RUNS, RunRecord, main_peak, read_record, read_rows, write_runs
from rloo_memory.errors import DISK_FULL, ConfigError, exit_code
from rloo_memory.sizes import GIB
from rloo_memory.storage import replace_text, write_json


def new_record(config: RunConfig, commit: str, **fields) -> RunRecord:
    """A record of this run, with `fields` in the place of defaults."""
    identity = {name: getattr(config, name) for name in ("run_id", "arm", "scale", "k", "repeat")}
    return RunRecord(**identity, config=config.as_dict(), commit=commit, **fields)


def write_record(record: RunRecord, folder: Path) -> None:
    write_json(folder / "run.json", vars(record))


def write_end(record: RunRecord, folder: Path) -> None:
    """Replace what `write_record` left when the run started. Where the disk is full, the record becomes an error that
    says so, without the trace, written over the old one's place. Raises OSError where the folder is gone, or is
    another launch's by now, or cannot be written at all."""
    before = read_record(folder)
    if before is None or before["launch"] != record.launch:
        raise FileNotFoundError(errno.ENOENT, "the run's folder was removed or replaced meanwhile")
    try:
        write_record(record, folder)
    except OSError as error:
        record.status, record.exit_code, record.error = "error", 1, no_room(error, folder)
        record.trace, record.step_seconds = [], []
        with (folder / "run.json").open("r+") as file:
            file.write(json.dumps(vars(record)) + "\n")
            file.truncate()


def no_room(error: OSError, folder: Path) -> str:
    """An error of writing in words, with what to do about it."""
    if error.errno in DISK_FULL:
        return f"the disk of {error.filename or folder} is full ({error.strerror}); make room and run again"
    return f"cannot write to {folder}: {error.strerror}"


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

    every = list(read_rows(folder / "memory.csv"))
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


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows that `write_csv` wrote, as text; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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


def main(argv: list[str] | None = None) -> int:
    return exit_code("record", _export, argv)


def export(machine: Path) -> int:
    """`write_runs`, and a line on stderr for each run that is left out. Returns how many are in the file. Raises
    OSError."""
    runs = write_runs(machine)
    for run in runs:
        if run.damage:
            where = run.folder / "run.json"
            print(f"{where} {run.damage}; it is left out: delete that folder and run it again", file=sys.stderr)
    return sum(run.record is not None for run in runs)


def _export(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.record", description="Write runs.jsonl from the run folders.")
    parser.add_argument("machine", type=directory, nargs="+", help="a folder of run folders: results/<machine>")
    for machine in parser.parse_args(argv).machine:
        if not (machine / RUNS).exists() and not any(machine.glob("*/run.json")):
            raise ConfigError(f"{machine} holds no runs; name a folder that experiments.suite wrote")
        try:
            count = export(machine)
        except OSError as error:
            raise ConfigError(no_room(error, machine)) from None
        print(f"{machine / RUNS}: {count} run(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
