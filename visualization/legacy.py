"""The 2025 experiment's CSV layout, read into the same Run form.

Its "allocated" column is what NVML showed for the whole device, other processes included. Its files do not say whether
a run finished: an out-of-memory run looks like its last sample. So every such run has status `unknown`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from visualization.files import LoadError, read_csv
from visualization.runs import GIB, LEGACY_USED, MIB, Run


@dataclass(frozen=True)
class Published:
    """A cell published in 2025 (TRL issue 3829): device-wide memory of an RTX 5090 in GiB, None: out of memory.

    The monitor divided NVML's bytes by 1024 twice and the plots once more, so what was called GB are GiB: its total
    column reads 32,607 MiB. `start_gib` is the last sample before the first step's rise, from the experiment's own
    file (github.com/luckyvickyricky/trl-rloo, results-prev/combined_gpu_memory.csv at dbd34d1, a sample each 0.2 s).
    """

    peak_gib: float | None
    start_gib: float

    @property
    def above_gib(self) -> float | None:
        return None if self.peak_gib is None else self.peak_gib - self.start_gib


PUBLISHED = {
    ("classic-baseline", 2): Published(14.38, 1.84),
    ("classic-baseline", 4): Published(26.99, 1.95),
    ("classic-baseline", 8): Published(None, 2.08),
    ("classic-string", 2): Published(6.40, 1.84),
    ("classic-string", 4): Published(11.01, 1.95),
    ("classic-string", 8): Published(20.25, 1.88),
}
PUBLISHED_BUDGET = 32 * GIB
PUBLISHED_PROMPT = 3000  # tokens
NOTE = "status unknown (*): 2025 files do not say how a run ended; out of memory looks like the run's last samples"
USED = "gpu_memory_allocated_mb"
COLUMNS = {
    USED: "device_used_bytes",
    "gpu_memory_total_mb": "device_total_bytes",
    "gpu_utilization_percent": "device_utilization_percent",
    "cpu_memory_used_mb": "host_used_bytes",
    "cpu_usage_percent": "cpu_percent",
}
REMEDY = "expected is the 2025 column layout, one CSV file per run or one combined file with method and rloo_k"


def log_files(folder: Path) -> list[Path]:
    """The CSV files under the folder that have 2025 columns: one per run if there are such, else combined ones."""
    headers = {path: _header(path) for path in sorted(folder.rglob("*.csv"))}
    logs = [path for path, header in headers.items() if USED in header]
    return [path for path in logs if "method" not in headers[path]] or logs


def load_folder(folder: Path) -> tuple[Run, ...]:
    """One Run per file; method and k come from the path (results_string-level/tiny-Qwen3ForCausalLM4/logs/x.csv is
    String at k=4). A folder with only a combined file is read as that file. Raises LoadError."""
    runs: list[Run] = []
    for path in log_files(folder):
        if "method" in _header(path):
            return load_combined(path)
        method, k = _method_and_k(path.resolve())
        repeat = sum((run.arm, run.k) == (method, k) for run in runs)
        runs.append(_run(method, k, repeat, _read(path, ()), path))
    return tuple(runs)


def load_combined(path: Path) -> tuple[Run, ...]:
    """One Run per method and rloo_k of a combined 2025 file. Raises LoadError."""
    frame = _read(path, ("rloo_k",))
    if "method" not in frame:
        raise LoadError(f"{path}: lacks the column method; {REMEDY}")
    groups = frame.groupby(["method", "rloo_k"], sort=True)
    return tuple(_run(str(method), int(k), 0, rows, path) for (method, k), rows in groups)


def _header(path: Path) -> list[str]:
    with path.open("rb") as file:
        return file.readline().decode("utf-8-sig", errors="replace").strip().split(",")


def _read(path: Path, more: tuple[str, ...]) -> pd.DataFrame:
    frame = read_csv(path, (*COLUMNS, *more), REMEDY)
    if frame.empty or "timestamp" not in frame:
        raise LoadError(f"{path}: holds no samples with a timestamp; {REMEDY}")
    seconds = pd.to_numeric(frame["timestamp"], errors="coerce")
    if seconds.isna().any():
        dates = pd.to_datetime(frame["timestamp"], errors="coerce", format="ISO8601")
        seconds = (dates - pd.Timestamp(0)).dt.total_seconds()
    if seconds.isna().any():
        raise LoadError(f"{path}: line {int(seconds.isna().idxmax()) + 2} has no usable timestamp; {REMEDY}")
    return frame.assign(timestamp=seconds)


def _method_and_k(path: Path) -> tuple[str, int]:
    """Method from the nearest folder named results_*, k from the trailing digits of a folder below it."""
    k = None
    for name in path.parent.parts[::-1]:
        if k is None and (digits := re.search(r"\d+$", name)):
            k = int(digits.group())
        if k is not None and name.startswith(("results_basic", "results_string")):
            return ("Basic" if name.startswith("results_basic") else "String"), k
    raise LoadError(
        f"{path}: the path does not tell method and k; expected is .../results_basic/<model><k>/logs/"
        "<name>.csv, or results_string-level"
    )


def _run(method: str, k: int, repeat: int, frame: pd.DataFrame, path: Path) -> Run:
    frame = frame.sort_values("timestamp", kind="stable", ignore_index=True)
    samples = frame[["timestamp", *COLUMNS]].rename(columns=COLUMNS)
    for name in ("device_used_bytes", "device_total_bytes", "host_used_bytes"):
        samples[name] = samples[name] * MIB
    used = samples["device_used_bytes"]
    if used.isna().any():
        raise LoadError(f"{path}: {method} k={k} has empty fields in {USED}; {REMEDY}")
    elapsed = samples["timestamp"] - samples["timestamp"][0]
    return Run(
        run_id=f"{method}_2025_k{k}_r{repeat}",
        arm=method,
        scale="2025",
        k=k,
        repeat=repeat,
        status="unknown",
        device_kind="cuda",
        device_name="",
        measure=LEGACY_USED,
        samples=samples.assign(elapsed_s=elapsed, t=elapsed, bytes=used),
        phases=pd.DataFrame(columns=["phase", "step", "start", "end", "t_start", "t_end", "mark_t", "mark_bytes"]),
        start_bytes=float(used[0]),
        peak_bytes=float(used.max()),
    )
