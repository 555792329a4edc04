"""One run as charts and tables see it, the cells that repeats form, and the careful reading of one file."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pandas as pd

GIB = 2**30
LEARN = "learn"  # the scale of the convergence runs: another workload, not compared with the others
ARMS = (
    "classic-baseline",
    "classic-string",
    "classic-string-exact",
    "classic-lean",
    "stock",
    "stock-accumulate",
    "stock-compact",
    "shared",
    "Basic",
    "String",
)
# Published in 2025 (TRL issue 3829): device-wide peak in GB on an RTX 5090, 32 GiB; None: out of memory
PUBLISHED_GB = {
    ("classic-baseline", 2): 14.38, ("classic-baseline", 4): 26.99, ("classic-baseline", 8): None,
    ("classic-string", 2): 6.40, ("classic-string", 4): 11.01, ("classic-string", 8): 20.25,
}  # fmt: skip
PUBLISHED_BUDGET = 32 * GIB
PUBLISHED_PROMPT = 3000  # tokens
DEVICE_WORDS = {"cuda": "GPU", "cpu": "CPU"}


class LoadError(Exception):
    """A results file that cannot be used: one line that names the file, what is wrong and the remedy."""


@dataclass(frozen=True)
class Measure:
    """Where one kind of memory figure lives in run.json, memory.csv and phases.csv, and its name on an axis."""

    record_column: str
    sample_column: str | None
    phase_column: str
    label: str


RESIDENT = Measure("peak_resident_bytes", "resident_bytes", "peak_resident_bytes", "process resident memory")
DEVICE_USED = Measure("peak_device_used_bytes", "device_used_bytes", "device_used_bytes", "device memory used")
RESERVED = Measure("peak_reserved_bytes", None, "peak_reserved_bytes", "memory reserved by torch")
LEGACY_USED = Measure(
    "peak_device_used_bytes", "device_used_bytes", "device_used_bytes", "device used (2025: called allocated)"
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run. Sizes in bytes, times in seconds; None where a figure does not exist.

    `peak_bytes` and `above_start_bytes` are None unless the run finished (status `ok`, or `unknown` for 2025 files,
    which do not say). `samples` has the columns of memory.csv plus `t` (seconds since the first step began) and
    `bytes` (the main measure, NaN while loading); `phases` those of phases.csv plus `t_start`, `t_end`,
    `mark_t` and `mark_bytes` (when and how high the phase's own high-water mark is drawn).
    """

    run_id: str
    arm: str
    scale: str
    k: int
    repeat: int
    status: str
    device_kind: str
    device_name: str
    measure: Measure
    samples: pd.DataFrame = field(repr=False)
    phases: pd.DataFrame = field(repr=False)
    error: str | None = None
    trl_version: str = ""
    torch_version: str = ""
    transformers_version: str = ""
    commit: str = ""
    prompt_tokens_requested: float | None = None
    prompt_tokens_fed_mean: float | None = None
    completion_tokens: float | None = None
    batch: float | None = None
    budget_bytes: float | None = None
    start_bytes: float | None = None
    peak_bytes: float | None = None
    peak_phase: str = ""
    step_seconds_median: float | None = None
    achieved_interval_s: float | None = None
    peak_missed_bytes: float | None = None

    @property
    def above_start_bytes(self) -> float | None:
        """Peak minus the level before the first step, in bytes."""
        return None if self.peak_bytes is None or self.start_bytes is None else self.peak_bytes - self.start_bytes

    @property
    def tokens_in_batch(self) -> float | None:
        """Tokens of all sequences of one batch: (prompt tokens really fed + completion tokens) x sequences."""
        if None in (self.prompt_tokens_fed_mean, self.completion_tokens, self.batch):
            return None
        return (self.prompt_tokens_fed_mean + self.completion_tokens) * self.batch


@dataclass(frozen=True, eq=False)
class Cell:
    """All repeats of one arm at one k of one scale."""

    scale: str
    arm: str
    k: int
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that have a peak."""
        return tuple(run for run in self.runs if run.peak_bytes is not None)

    def count(self, status: str) -> int:
        """How many runs ended with this status."""
        return sum(run.status == status for run in self.runs)

    def values(self, name: str) -> list[float]:
        """That figure of every finished run that has it, unsorted."""
        return [value for run in self.finished if (value := getattr(run, name)) is not None]

    def median(self, name: str) -> float | None:
        """Median of that figure over the finished runs, None when there is none."""
        values = self.values(name)
        return median(values) if values else None

    def failure(self, oom: str = "OOM") -> str:
        """ "" when every run finished, "OOM", "error" or both when none did, else "1 of 3 OOM"."""
        kinds = [(self.count("oom"), oom), (self.count("error"), "error")]
        if self.finished:
            return ", ".join(f"{count} of {len(self.runs)} {word}" for count, word in kinds if count)
        return " + ".join(word for count, word in kinds if count)


def in_order(arms: Iterable[str]) -> list[str]:
    """The arms, each once, in the order of the project's table (`shared-c4` after `shared`), others last by name."""

    def place(arm: str) -> tuple[int, int, str]:
        name, _, passes = arm.rpartition("-c")
        if name in ARMS and passes.isdigit():
            return ARMS.index(name), int(passes), arm
        return ARMS.index(arm) if arm in ARMS else len(ARMS), 0, arm

    return sorted(set(arms), key=place)


def by_trainer(arms: Iterable[str]) -> list[list[str]]:
    """The arms of TRL's old trainer, then those of today's: what is compared curve by curve runs on one trainer."""
    ordered = in_order(arms)
    groups = (
        [arm for arm in ordered if arm.startswith("classic")],
        [arm for arm in ordered if not arm.startswith("classic")],
    )
    return [group for group in groups if group]


def alone(runs: Iterable[Run]) -> dict[int, str]:
    """k -> arm, for every k that one arm alone was run at while the runs hold several arms: nothing to compare."""
    table: dict[int, set[str]] = {}
    for run in runs:
        table.setdefault(run.k, set()).add(run.arm)
    several = len(set().union(*table.values())) > 1
    return {k: "".join(arms) for k, arms in sorted(table.items()) if several and len(arms) == 1}


def cells(runs: Iterable[Run]) -> list[Cell]:
    """Group runs into cells, ordered by scale, arm and k."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.scale, run.arm, run.k), []).append(run)
    arms = in_order(arm for _, arm, _ in groups)
    order = sorted(groups, key=lambda key: (key[0], arms.index(key[1]), key[2]))
    return [Cell(*key, tuple(sorted(groups[key], key=lambda run: run.repeat))) for key in order]


def describe(runs: Sequence[Run]) -> str:
    """One line: device, versions, commit, scale, repeats. Raises LoadError when the runs cannot share one picture."""
    kinds = {run.device_kind for run in runs if run.device_kind}  # a run that failed early may not know its device
    measures = {run.measure.label for run in runs if run.peak_bytes is not None}
    if len(kinds) > 1 or len(measures) > 1:
        raise LoadError(
            f"runs of {' and '.join(sorted(kinds))} measured as {' and '.join(sorted(measures))} do not "
            "belong in one picture; keep one results folder per machine and device"
        )
    counts = sorted({len(cell.runs) for cell in cells(runs)})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    device = DEVICE_WORDS.get("".join(kinds), "device")
    device += f": {_joined(run.device_name for run in runs) or 'name not recorded'}"
    found = {
        "torch": _joined(run.torch_version for run in runs),
        "transformers": _joined(run.transformers_version for run in runs),
        "trl": _joined(run.trl_version for run in runs),
        "commit": _joined(_short(run.commit) for run in runs),
    }
    versions = [f"{name} {value}" for name, value in found.items() if value] or ["versions and commit not recorded"]
    return " · ".join(
        [
            device,
            *versions,
            f"scale {_joined(run.scale for run in runs)}",
            f"{repeats} {'repeat' if repeats == '1' else 'repeats'} per cell",
        ]
    )


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted({value for value in values if value}))


def _short(commit: str) -> str:
    digits, _, mark = commit.partition("-")
    return digits[:10] + (f"-{mark}" if mark else "")


def read_text(path: Path, remedy: str) -> str:
    """The file's text. Raises LoadError when it is missing, unreadable or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LoadError(f"{path}: the file is missing; {remedy}") from None
    except UnicodeDecodeError:
        raise LoadError(f"{path}: not a text file; {remedy}") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def read_json(path: Path, remedy: str) -> dict:
    """The file's JSON object. Raises LoadError when it is not one."""
    try:
        value = json.loads(read_text(path, remedy))
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds no JSON object; {remedy}")
    return value


def read_csv(path: Path, columns: Sequence[str], remedy: str, text_columns: Sequence[str] = ()) -> pd.DataFrame:
    """The file's complete lines; every named column not in `text_columns` as numbers (empty fields as NaN).

    A last line without its newline was cut off by a kill and is left out. Raises LoadError naming the file and line.
    """
    text = read_text(path, remedy)
    text = text[: text.rfind("\n") + 1]
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise LoadError(f"{path}: not valid CSV ({error}); {remedy}") from None
    if not rows:
        raise LoadError(f"{path}: holds no complete line, not even a header; {remedy}")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise LoadError(f"{path}: lacks the column {', '.join(missing)}; {remedy}")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise LoadError(f"{path}: line {number} has {len(row)} fields, the header {len(rows[0])}; {remedy}")
    numeric = [name for name in columns if name not in text_columns]
    kinds = {name: str for name in rows[0] if name not in numeric}
    frame = pd.read_csv(io.StringIO(text), dtype=kinds, keep_default_na=False, na_values=dict.fromkeys(numeric, ""))
    for name in numeric:
        numbers = pd.to_numeric(frame[name], errors="coerce")
        bad = numbers.isna() & frame[name].notna()
        if bad.any():
            row = int(bad.idxmax())
            raise LoadError(f"{path}: line {row + 2}, {name}: {frame[name][row]!r} is not a number; {remedy}")
        frame[name] = numbers
    return frame


def run_cli(main: Callable[[], int]) -> int:
    """Run a command; a LoadError or a folder that cannot be written becomes one line on stderr and exit code 2."""
    try:
        return main()
    except LoadError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}; choose another place with --out"
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Lines of a table whose first `texts` columns are text, the others numbers."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
