"""The runs of results/<machine> as pandas frames: a row a run, a row a phase, and a row a cell (scale, arm, k)."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from experiments import arms
from experiments.run_record import APART, FINISHED, PHASE_COLUMNS, stored_runs

GIB, MIB = 2**30, 2**20
LEARN = "learn"  # the scale of the convergence runs: another workload
BENCH = "bench"  # the scale of a model large enough that a step's time is the model's
TIMES = "-time"  # ends the name of a scale whose runs are there for their seconds: `bench-time` for `bench`
PHASES = ("generate", "score", "train", "optimizer")
# What each arm is, in the order of every table
ARMS = {name: arm.shows for name, arm in arms.ARMS.items()}
# Those that a first reader needs, beginning with what TRL does on a GPU: logits of completions only
IN_SHORT = {
    "stock-compact": "TRL, all completions together",
    "stock-compact-accumulate": "TRL, one completion at a time",
    "shared-accumulate": "prefix sharing, two completions at a time",
}
# Who is fair to compare with: on a GPU, TRL has logits of completions only
RIVALS = {"classic-lean": ["classic-baseline"], "shared-accumulate": ["stock-compact-accumulate", "stock-compact"]}
BASELINE = "classic-baseline"  # what percentages of peaks refer to
DEVICE_WORDS = {"cuda": "GPU", "cpu": "CPU"}
MEASURES = {"peak_resident_bytes": "process resident memory", "peak_device_used_bytes": "device memory used"}
TRACE = ["run_id", "scale", "arm", "k", "repeat", "step", "reward", "loss", "kl"]
FAILURES = {"oom": "out of memory", "error": "error", "killed": "killed"}
LEAST = GIB // 10  # of peak above start, bytes: below it, percentages are noise
MARK = "\N{DOUBLE DAGGER}"
NOTE = f"{MARK} repeats differ by more than a factor of {APART}, as on a busy machine: no part of any comparison"


@dataclass(frozen=True)
class Results:
    """Sizes in bytes, times in seconds, NaN where a figure does not exist. A run that failed has no peak."""

    folder: Path
    runs: pd.DataFrame
    phases: pd.DataFrame
    trace: pd.DataFrame  # step, reward, loss, kl of each update of runs that finished
    left_out: pd.DataFrame  # runs whose settings are not those of the newest one of their cell

    def of(self, scale: str) -> "Results":
        """One scale, with the runs that are there for its seconds."""
        return self.where(lambda runs: runs.scale.isin([scale, scale + TIMES]))

    def only(self, arms: Iterable[str], k: int) -> "Results":
        return self.where(lambda runs: runs.arm.isin(list(arms)) & (runs.k == k))

    def where(self, keep: Callable[[pd.DataFrame], pd.Series]) -> "Results":
        return replace(self, runs=self.runs[keep(self.runs)], left_out=self.left_out[keep(self.left_out)])

    @cached_property
    def own(self) -> pd.DataFrame:
        """The runs, less those that are there only for the seconds of others."""
        scales = set(self.runs.scale)
        timing = self.runs.scale.str.endswith(TIMES) & self.runs.scale.str.removesuffix(TIMES).isin(scales)
        return self.runs[~timing]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """A row a cell, medians over the runs that finished; seconds are those of runs made for them, if any."""
        rows = [self.cell(*key, mine) for key, mine in self.own.groupby(["scale", "arm", "k"])]
        rows.sort(key=lambda row: (row["scale"], self.arms.index(row["arm"]), row["k"]))
        return pd.DataFrame(rows).set_index(["arm", "k"], drop=False)

    def cell(self, scale: str, arm: str, k: int, mine: pd.DataFrame) -> dict:
        """The figures of a cell, whose runs are `mine`."""
        done = mine[mine.status == "ok"]
        same = (self.runs.arm == arm) & (self.runs.k == k) & (self.runs.status == "ok")
        timed = self.runs[same & (self.runs.scale == scale + TIMES)]
        clocked = timed if len(timed) else done
        row = {"scale": scale, "arm": arm, "k": k, "runs": len(mine), "ok": len(done), "timed": len(timed)}
        row |= {status: (mine.status == status).sum() for status in FAILURES}
        figures = {name: done[name] for name in ("peak_bytes", "above_bytes")}
        figures |= {name: clocked[f"{name}_seconds"] for name in ("first", "step", "generate", "score", "train")}
        for name, of in figures.items():
            row |= {name: of.median(), f"{name}_low": of.min(), f"{name}_high": of.max()}
        first = mine.bfill().iloc[0]  # what all repeats were asked to do, as `load` saw to
        row |= {name: first[name] for name in ("asked", "fed", "completion_tokens", "batch", "budget_bytes")}
        row["start_bytes"] = done.start_bytes.median()
        row["tokens"] = (done.fed + done.completion_tokens).mul(done.batch).median()
        failed = [(row[status], words) for status, words in FAILURES.items() if row[status]]
        some = [f"{count} of {len(mine)} {words}" for count, words in failed]
        row["failure"] = ", ".join(some) if len(done) else " + ".join(words for _, words in failed)
        return row

    @cached_property
    def arms(self) -> list[str]:
        return in_order(self.own.arm)

    @property
    def measure(self) -> str:
        """What a peak is here. One folder holds the runs of one device."""
        found = self.own[self.own.status == "ok"].measure
        return found.iloc[0] if len(found) else self.own.measure.iloc[0]

    def samples(self, run: pd.Series) -> pd.DataFrame:
        """Of memory.csv, only where the run was made: `t`, seconds since the first step began, and `bytes`."""
        path = self.folder / run.run_id / "memory.csv"
        if not path.exists():
            return pd.DataFrame(columns=["t", "bytes"])
        frame = pd.read_csv(path, on_bad_lines="skip")
        frame = frame[: None if path.read_bytes().endswith(b"\n") else -1]  # a kill cut the last line
        return frame.assign(t=frame.timestamp - run.begin, bytes=frame.get(run.measure.removeprefix("peak_"), np.nan))

    def describe(self) -> str:
        """Device, versions, commit, scale and repeats in one line."""
        runs = self.runs
        named = {name: runs[f"{name}_version"] for name in ("torch", "transformers", "trl")}
        named |= {"commit": runs.commit.str[:10], "scale": self.own.scale}
        parts = [f"{name} {joined(values)}" for name, values in named.items() if joined(values)]
        device = DEVICE_WORDS.get(joined(runs.device_kind), "device")
        timed = self.cells.timed[self.cells.timed > 0]
        repeats = f"{span(self.cells.runs)} run{'s' if self.cells.runs.max() > 1 else ''} per cell"
        repeats += f" for memory, {span(timed)} for seconds" if len(timed) else ""
        return " · ".join([f"{device}: {joined(runs.device_name)}", *parts, repeats])

    def footnotes(self) -> list[str]:
        """A line for each kind of run that is not what it seems."""
        told = {
            "killed before it could report": self.own[self.own.status == "killed"],
            "samples end before the run does": self.own[self.own.sampler_lost & (self.own.status == "ok")],
            "left out, as their settings are not those of the newest run": self.left_out,
        }
        return [f"{what}: {', '.join(runs.run_id)}" for what, runs in told.items() if len(runs)]

    def scales(self) -> list[str]:
        """All, first what everybody runs, `learn` last."""
        found = sorted(set(self.own.scale))
        return sorted(found, key=lambda scale: (scale == LEARN, ("seed", "cpu", scale).index(scale)))

    def charted(self) -> list[str]:
        """The scales that have charts of their own: the first one, and `bench`."""
        first, *others = self.scales()
        return [first, *(scale for scale in others if scale == BENCH)]


def load(folder: Path) -> Results:
    """Of run folders and of runs.jsonl, which has them without their samples."""
    try:
        found = stored_runs(folder)
    except ValueError as error:  # a line says what is wrong
        raise SystemExit(f"error: {error}") from error
    if not found:
        raise SystemExit(f"error: {folder}: holds no runs; run ./run_baseline-rloo.sh first, or give another folder")
    rows, phases, trace = [], [], []
    for run in found:
        its = pd.DataFrame(list(run.phases), columns=PHASE_COLUMNS)
        row = row_of(run.record, its)
        rows.append(row)
        level = its[row["measure"].replace("peak_device", "device")].astype(float)
        phases.append(its.assign(run_id=run.run_id, bytes=level))
        if row["status"] == "ok":
            trace += [row | step for step in run.record["trace"]]
    runs, known = pd.DataFrame(rows), pd.DataFrame(trace, columns=TRACE)
    # Asked for other than the newest one of its cell, if possible of those that finished
    ordered = runs.assign(done=runs.status.isin(FINISHED)).sort_values(["done", "started_at"], kind="stable")
    newest = ordered.groupby(["scale", "arm", "k"]).settings.transform("last")
    other = runs.settings != newest.reindex(runs.index)
    known = known[~known.run_id.isin(runs.run_id[other])]
    return Results(folder, runs[~other], pd.concat(phases, ignore_index=True), known, runs[other])


def row_of(record: dict, phases: pd.DataFrame) -> dict:
    """The record's figures, and the seconds of each phase of a step: of those behind the first, if there are any."""
    row = {name: value for name, value in record.items() if not isinstance(value, list | dict)}
    if unusual := re.search(r"_c(\d+)_r\d+$", record["run_id"]):  # not the arm's usual number: never the same cell
        row["arm"] += f"-c{unusual[1]}"
    row["status"] = "killed" if record["status"] == "running" else record["status"]
    asked = {name: value for name, value in record["config"].items() if name not in ("repeat", "seed")}
    row["settings"] = json.dumps(asked, sort_keys=True)
    measure = "peak_device_used_bytes" if record["device_kind"] == "cuda" else "peak_resident_bytes"
    row |= {"measure": measure, "asked": record["prompt_tokens_requested"], "fed": record["prompt_tokens_fed_mean"]}
    row["peak_bytes"] = record[measure] if row["status"] == "ok" else None
    row["above_bytes"] = row["peak_bytes"] and row["peak_bytes"] - (record["start_bytes"] or 0)
    first, *later = record["step_seconds"] or [None]
    row |= {"first_seconds": first if later else None, "step_seconds": median(later) if later else first}
    steps = phases[phases.step > 0]
    row["begin"] = steps.start.min()
    for phase, mine in steps[steps.step > min(1, steps.step.max() - 1)].groupby("phase"):
        row[f"{phase}_seconds"] = (mine.end - mine.start).sum() / mine.step.nunique()
    sampler = record["sampler"]
    row["sampler_lost"] = not sampler or sampler.get("lost_after_s") is not None
    row |= {name: (sampler or {}).get(name) for name in ("achieved_interval_s", "peak_missed_bytes")}
    numbers = ["asked", "fed", "completion_tokens", "batch"]
    numbers += [f"{name}_seconds" for name in ("first", "step", *PHASES)]
    numbers += [f"{name}_bytes" for name in ("budget", "start", "peak", "above")]
    return row | {name: float("nan") if row.get(name) is None else float(row[name]) for name in numbers}


def apart(low: float, high: float) -> bool:
    """Whether repeats say nothing."""
    return high > APART * low


def seconds(median: float, low: float, high: float, digits: int) -> str:
    """The median and, where repeats are too far apart, their mark; nothing where none was clocked."""
    return "" if pd.isna(median) else f"{median:.{digits}f}{MARK if apart(low, high) else ''}"


def times(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """How many times faster `ours` is than `theirs`, each (median, low, high); NaN where one of them says nothing."""
    (mine, *range_of_mine), (other, *range_of_other) = ours, theirs
    return float("nan") if apart(*range_of_mine) or apart(*range_of_other) else other / mine


def usual_arm(arm: str) -> tuple[str, int]:
    """("shared", 4) for `shared-c4`, which takes another number of completions a pass than `shared`; else (arm, 0)."""
    name, _, passes = arm.rpartition("-c")
    return (name, int(passes)) if name in ARMS and passes.isdigit() else (arm, 0)


def in_order(arms: Iterable[str]) -> list[str]:
    """Each once, in the order of the project's table, others last by name."""

    def place(arm: str) -> tuple[int, int, str]:
        name, passes = usual_arm(arm)
        return (*ARMS, name).index(name), passes, arm

    return sorted(set(arms), key=place)


def in_words(arms: Iterable[str]) -> str:
    """What each arm is, in one line."""
    words = {arm: what_it_is(arm) for arm in in_order(arms)}
    return "; ".join(f"{arm}: {text}" for arm, text in words.items() if text != arm)


def what_it_is(arm: str) -> str:
    name, passes = usual_arm(arm)
    return f"{name}, {passes} at a time" if passes else ARMS.get(name, name)


def by_trainer(arms: Iterable[str]) -> list[list[str]]:
    """The arms of TRL's old trainer, then those of today's: what is compared curve by curve runs on one trainer."""
    ordered = in_order(arms)
    groups = ([arm for arm in ordered if arm.startswith("classic") is old] for old in (True, False))
    return [group for group in groups if group]


def joined(values: Iterable[str | None]) -> str:
    return ", ".join(sorted({value for value in values if value and value == value}))


def span(values: Iterable[float], digits: int = 0) -> str:
    """The least and the most of them, or the one that all are said as."""
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (min(values), max(values))))
