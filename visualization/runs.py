"""One run as charts and tables see it, the cells that repeats form, and what arms are called in words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import pandas as pd

from visualization.files import LoadError
from visualization.seconds import Seconds

GIB = 2**30
MIB = 2**20
LEARN = "learn"  # the scale of the convergence runs: another workload, not compared with the others
BENCH = "bench"  # the scale of a model large enough that a step's time is the model's
DEFAULT_SCALES = ("seed", "cpu", "2025")  # what everybody runs
TIMES = "-time"  # ends the name of a scale whose runs are there for their seconds: those of `bench-time` for `bench`
# What each arm is, in words that stand alone, in the order of every table
ARMS = {
    "classic-baseline": "TRL 0.21 as it is",
    "classic-string": "the change published in 2025, prompts cut to 1,024 tokens",
    "classic-string-exact": "the same change, nothing cut",
    "classic-lean": "TRL 0.21, logits only where they are read",
    "stock": "TRL 1.16 as it is",
    "stock-accumulate": "TRL 1.16, one completion at a time",
    "stock-compact": "TRL 1.16, logits of completions only",
    "stock-compact-accumulate": "TRL 1.16, logits of completions only, one completion at a time",
    "shared": "TRL 1.16 with prefix sharing, two completions a pass",
    "shared-accumulate": "TRL 1.16 with prefix sharing, two completions a micro-batch",
    "Basic": "the 2025 baseline",
    "String": "the change published in 2025",
}
# Those that a first reader needs, beginning with what TRL does on a GPU: logits of completions only
IN_SHORT = {
    "stock-compact": "TRL, all completions together",
    "stock-compact-accumulate": "TRL, one completion at a time",
    "shared-accumulate": "prefix sharing, two completions at a time",
}
BASELINE = "classic-baseline"  # what percentages of peaks refer to
DEVICE_WORDS = {"cuda": "GPU", "cpu": "CPU"}
LEAST = GIB // 10  # of peak above start, bytes: below it, percentages are noise
LOST = "\N{DAGGER}"  # marks a figure whose run lost its sampler


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
LEGACY_USED = replace(DEVICE_USED, label="device used (2025: called allocated)")


@dataclass(frozen=True, eq=False)
class Run:
    """One run. Sizes in bytes, times in seconds; None where a figure does not exist.

    `status`: `ok`, `oom`, `error`, `killed` (its record still says that it runs), `damaged` (its files cannot be used,
    `error` says why), or `unknown` for 2025 files, which do not say. `peak_bytes` and `above_start_bytes` are None
    unless the run finished (`ok` or `unknown`), `peaks` holds the record's peak_*_bytes under the same condition.
    `samples` has the columns of memory.csv plus `t` (seconds since the first step began) and
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
    peaks: Mapping[str, float | None] = field(default_factory=dict)
    peak_phase: str = ""
    step_seconds_median: float | None = None
    achieved_interval_s: float | None = None
    peak_missed_bytes: float | None = None
    sampler_lost: str = ""  # when its samples end before the run does: "after 12 s", or that nobody knows
    trace: tuple[Mapping, ...] = field(default=(), repr=False)  # of each update: step, reward, loss, kl
    timed: tuple["Run", ...] = field(default=(), repr=False)  # runs of the same cell whose seconds count in its place

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

    @property
    def timed(self) -> tuple[Run, ...]:
        """The runs that are there for their seconds, if there are such."""
        return next((run.timed for run in self.runs if run.timed), ())

    def count(self, status: str) -> int:
        """How many runs ended with this status."""
        return sum(run.status == status for run in self.runs)

    def seconds(self, phase: str | None = None) -> Seconds:
        """Of a step, or of one phase of it."""
        runs = self.timed or self.finished
        return Seconds.of(seconds_a_step(run, phase) if phase else run.step_seconds_median for run in runs)

    def values(self, name: str) -> list[float]:
        """That figure of every finished run that has it, unsorted. Seconds have `seconds`."""
        return [value for run in self.finished if (value := getattr(run, name)) is not None]

    def median(self, name: str) -> float | None:
        """Median of that figure over the finished runs, None when there is none."""
        values = self.values(name)
        return median(values) if values else None

    @property
    def above(self) -> float | None:
        """The median peak above the start level, bytes; None where there is none."""
        return self.median("above_start_bytes")

    def change(self, reference: "Cell | None") -> float | None:
        """Change of that peak against the reference's, as a fraction; None where one is missing or the reference's is
        too little to compare with."""
        ours, theirs = self.above, reference and reference.above
        return ours / theirs - 1 if ours is not None and theirs and theirs >= LEAST else None

    @property
    def mark(self) -> str:
        """A dagger when a finished run lost its sampler, else nothing."""
        return LOST if any(run.sampler_lost for run in self.finished) else ""

    def first(self, name: str) -> float | None:
        """That figure of the first run that has it, finished or not: for what all repeats were asked to do."""
        return next((value for run in self.runs if (value := getattr(run, name)) is not None), None)

    def failure(self, oom: str = "OOM") -> str:
        """ "" when every run finished, "OOM", "error" or several when none did, else "1 of 3 OOM"."""
        kinds = [(self.count("oom"), oom), *((self.count(word), word) for word in ("error", "killed", "damaged"))]
        if self.finished:
            return ", ".join(f"{count} of {len(self.runs)} {word}" for count, word in kinds if count)
        return " + ".join(word for count, word in kinds if count)


def in_order(arms: Iterable[str]) -> list[str]:
    """The arms, each once, in the order of the project's table (`shared-c4` after `shared`), others last by name."""

    def place(arm: str) -> tuple[int, int, str]:
        name, passes = usual_arm(arm)
        return (*ARMS, name).index(name), passes, arm

    return sorted(set(arms), key=place)


def usual_arm(arm: str) -> tuple[str, int]:
    """("shared", 4) for `shared-c4`, which takes another number of completions a pass than `shared`; else (arm, 0)."""
    name, _, passes = arm.rpartition("-c")
    return (name, int(passes)) if name in ARMS and passes.isdigit() else (arm, 0)


def in_words(arms: Iterable[str]) -> str:
    """What each arm is, in one line; arms that this project does not know stay out."""
    told = []
    for arm in in_order(arms):
        name, passes = usual_arm(arm)
        if passes:
            told.append(f"{arm}: {name}, {passes} at a time")
        elif name in ARMS:
            told.append(f"{arm}: {ARMS[name]}")
    return "; ".join(told)


def scales(runs: Iterable[Run]) -> list[str]:
    """The scales that were run, by name. A damaged folder whose name tells no scale has none."""
    return sorted({run.scale for run in runs if run.scale})


def shown(runs: Sequence[Run]) -> list[str]:
    """The scales to show, what everybody runs first; `learn` only where there is nothing else."""
    found = [scale for scale in scales(runs) if scale != LEARN] or scales(runs)
    return sorted(found, key=lambda scale: (*DEFAULT_SCALES, scale).index(scale))


def charted(runs: Sequence[Run]) -> list[str]:
    """The scales that have charts and answers of their own: the first one, and `bench`. Tables tell the others."""
    first, *others = shown(runs)
    return [first, *(scale for scale in others if scale == BENCH)]


def compared(runs: Sequence[Run]) -> list[Cell]:
    """The cells of the largest k that most arms were run at, in the order of the project's table."""
    table = cells(runs)
    k = max({cell.k for cell in table}, key=lambda k: (sum(cell.k == k for cell in table), k))
    return [cell for cell in table if cell.k == k]


def in_short(runs: Sequence[Run]) -> list[Cell | None]:
    """The cells of `IN_SHORT` at k = 8 of the scale `bench`, in its order, None where one was not run."""
    table = {cell.arm: cell for cell in cells(runs) if (cell.scale, cell.k) == (BENCH, 8)}
    return [table.get(arm) for arm in IN_SHORT]


def to_time(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs whose seconds can be compared: of cells that were timed in runs of their own, if there are any."""
    return [run for run in runs if run.timed] or runs


def seconds_a_step(run: Run, phase: str) -> float | None:
    """Seconds that a step of the run spends in that phase, on average, None where it is not marked."""
    rows = run.phases[(run.phases["phase"] == phase) & (run.phases["step"] > 0)]
    return (rows["end"] - rows["start"]).sum() / rows["step"].nunique() if len(rows) else None


def footnotes(runs: Sequence[Run]) -> list[str]:
    """A line for each kind of run that is not what it seems: lost its sampler, was killed, is damaged."""
    lost = [f"{run.run_id} ({run.sampler_lost})" for run in runs if run.sampler_lost]
    lines = [f"{LOST} sampler lost, samples end before the run does: {', '.join(lost)}"] if lost else []
    if timed := [len(cell.timed) for cell in cells(runs) if cell.timed]:
        lines.append(f"Seconds are medians of {span(timed)} runs, separate from those for memory")
    for status, words in (("killed", "killed before it could report"), ("damaged", "damaged and left out")):
        named = [run.run_id for run in runs if run.status == status]
        lines += [f"{words}: {', '.join(named)}"] if named else []
    return lines


def by_trainer(arms: Iterable[str]) -> list[list[str]]:
    """The arms of TRL's old trainer, then those of today's: what is compared curve by curve runs on one trainer."""
    ordered = in_order(arms)
    groups = ([arm for arm in ordered if arm.startswith("classic") is old] for old in (True, False))
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
    repeats = span(len(cell.runs) for cell in cells(runs))
    every = [*runs, *(timed for run in runs for timed in run.timed)]
    packages = ("torch", "transformers", "trl")
    versions = {name: _joined(getattr(run, f"{name}_version") for run in every) for name in packages}
    versions["commit"] = _joined(_short(run.commit) for run in every)
    named = [f"{name} {value}" for name, value in versions.items() if value] or ["versions and commit not recorded"]
    device = _joined(run.device_name for run in every) or "name not recorded"
    scale = _joined(run.scale.removesuffix(TIMES) for run in every)
    count = f"{repeats} {'repeat' if repeats == '1' else 'repeats'} per cell"
    return " · ".join([f"{DEVICE_WORDS.get(''.join(kinds), 'device')}: {device}", *named, f"scale {scale}", count])


def span(counts: Iterable[int]) -> str:
    """The least and the most of them, or the one that all are."""
    found = sorted(counts)
    return " to ".join(str(count) for count in dict.fromkeys((found[0], found[-1])))


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted({value for value in values if value}))


def _short(commit: str) -> str:
    digits, _, mark = commit.partition("-")
    return digits[:10] + (f"-{mark}" if mark else "")
