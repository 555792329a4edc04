"""Makes a run's record, run.json, and has runs.jsonl of all runs written."""

import json
import os
from pathlib import Path

import pandas

from experiments.config import RunConfig
from experiments.run_record import PHASE_COLUMNS, RUNS, SAMPLE_COLUMNS, RunRecord, main_peak, read_rows, stored_runs
from rloo_memory.errors import ConfigError
from rloo_memory.sizes import GIB
from rloo_memory.storage import replace_text, write_json


def new_record(config: RunConfig, commit: str, **known) -> RunRecord:
    """A record of this run, with the fields that are `known`."""
    names = ("run_id", "arm", "scale", "k", "repeat", "completion_tokens", "batch", "budget_bytes")
    same = {name: getattr(config, name) for name in names}
    model = f"{config.shape}, vocabulary {config.vocab_size}, random weights"
    told = dict(config=vars(config), commit=commit, model=model, prompt_tokens_requested=config.prompt_tokens)
    return RunRecord(**same | told | known)


def write_record(record: RunRecord, folder: Path) -> None:
    write_json(folder / "run.json", vars(record))


def outcome(record: dict) -> str:
    """How a run ended, in words, GiB and tokens; also what its peak rests on where the sampler did not last."""
    if record["status"] == "oom":
        return "OUT OF MEMORY"
    if record["status"] != "ok":
        return f"FAILED: {record['error']}"
    peak, above = (size / GIB for size in main_peak(record))
    text = f"peak {peak:.2f} GiB, {above:.2f} above start, {record['prompt_tokens_fed_mean']:.0f} prompt tokens"
    if "lost_after_s" in record["sampler"]:
        lost = record["sampler"]
        text += f"; SAMPLER LOST after {lost['lost_after_s']:.1f} s, the peak is from {lost['peak_from']}"
    return text


def fill_peaks(record: RunRecord, phases, folder: Path, sampler_lasted: bool) -> None:
    """Peaks after loading: the larger of what was sampled (memory.csv in `folder`) and what torch or the kernel
    counted (a `PhaseRecorder`)."""
    samples = pandas.DataFrame(read_rows(folder / "memory.csv"), columns=SAMPLE_COLUMNS, dtype=float)
    peaks = pandas.DataFrame(phases.peaks, columns=PHASE_COLUMNS).query("phase != 'load'")
    after = samples[samples.timestamp >= peaks.start.min()]

    def sampled(column: str) -> int | None:
        return largest(after[column])

    def counted(column: str) -> int | None:
        return largest(peaks[column])

    record.peak_allocated_bytes = counted("peak_allocated_bytes")
    record.peak_reserved_bytes = counted("peak_reserved_bytes")
    record.peak_resident_bytes = largest((counted("peak_resident_bytes"), sampled("resident_bytes")))
    record.peak_process_device_bytes = sampled("process_device_bytes")
    column, source = "peak_resident_bytes", "the kernel's high-water mark"
    seen, main = sampled("resident_bytes"), record.peak_resident_bytes
    if record.device_kind == "cuda" and len(peaks):
        # NVML has no peak counter: torch's pool at its peak, plus what the device held besides the pool at the start
        with_pool = record.peak_reserved_bytes + phases.outside_pool_bytes
        seen = sampled("device_used_bytes")
        record.peak_device_used_bytes = main = largest((seen, counted("device_used_bytes"), with_pool))
        column, source = "peak_allocated_bytes", "torch's counters"
    if counted(column) is not None:  # some containers forbid to reset the mark
        record.peak_phase = peaks.phase[peaks[column].astype(float).idxmax()]
    times, gaps = samples.elapsed_s, samples.elapsed_s.diff().dropna()
    record.sampler = dict(
        requested_interval_s=record.config["interval"],
        achieved_interval_s=round(gaps.median(), 6) if len(gaps) else None,
        samples=len(samples),
        peak_missed_bytes=None if main is None or seen is None else max(main - seen, 0),
    )
    if not sampler_lasted:
        record.sampler |= dict(lost_after_s=max(times, default=0.0), peak_from=source)


def largest(values) -> int | None:
    """None of none."""
    return max((int(value) for value in values if pandas.notna(value)), default=None)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows that `write_csv` wrote, as text; none where there is no such file."""
    return pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records") if path.exists() else []


def write_csv(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    """Write through a temporary file, as `write_json` does; what is not in `columns` is left out."""
    replace_text(path, pandas.DataFrame(rows, columns=list(columns), dtype=object).to_csv(index=False))


def make_writable(folder: Path) -> None:
    """Make `folder` if need be. Raises `ConfigError` where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --results") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to {folder}; choose another --results")


def export(machine: Path) -> int:
    """Write runs.jsonl from the run folders as they are now. Runs that have no folder here stay in it as they are.
    Returns how many are in the file."""
    lines = []
    for run in stored_runs(machine):
        phases = [[row.get(name) for name in PHASE_COLUMNS] for row in run.phases]
        lines.append(json.dumps({"record": run.record, "phases": phases}) + "\n")
    if lines:
        replace_text(machine / RUNS, "".join(lines))
    return len(lines)
