"""What was measured: each sample in bench_samples.jsonl, and bench.csv, a row a number, which is published."""

import contextlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import pandas

from experiments.measuring import FACTS
from experiments.record import read_csv, write_csv
from rloo_memory.storage import replace_text

SAMPLES, TABLE = "bench_samples.jsonl", "bench.csv"
OUT_OF_MEMORY = "out of memory"
NEAR = 1.1  # times the seconds of another way: what takes more repeats to tell apart
COLUMNS = (
    "measurement", "model", "prompt_tokens", "completion_tokens", "k", "way", "metric", "unit", "median", "low",
    "high", "repeats", "failure", *FACTS,
)  # fmt: skip
UNITS = {"seconds": "s", "bytes": "bytes"}  # by the last word of a metric


@dataclass(frozen=True)
class Cell:
    """What is measured in several ways: a model, and tokens of its prompt and of each of its k completions."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    k: int

    def __str__(self) -> str:
        return f"{self.model}, prompt {self.prompt_tokens:,}, completion {self.completion_tokens:,}, k {self.k}"


class Samples:
    """Samples of one measurement on one machine by this very code, each written as soon as it is taken."""

    def __init__(self, folder: Path, measurement: str, facts: dict[str, str]):
        self.folder, self.about = folder, {"measurement": measurement, **facts}

    def taken(self, cell: Cell) -> dict[tuple[str, int], dict]:
        """(way, repeat) -> the last sample of a cell."""
        wanted = self.about | asdict(cell)
        return {(each["way"], each["repeat"]): each for each in self.kept() if each.items() >= wanted.items()}

    def missing(self, cell: Cell, ways: tuple[str, ...], repeats: int, repeats_near: int) -> list[tuple[int, str]]:
        """(repeat, way) of what is still to be measured, the ways alternating: `repeats` of each, and `repeats_near`
        of those that take about as long as another."""
        there = self.taken(cell)

        def lacking(of: tuple[str, ...], most: int) -> list[tuple[int, str]]:
            return [(repeat, way) for repeat in range(most) for way in of if (way, repeat) not in there]

        return lacking(ways, repeats) or lacking(near(there, ways), repeats_near)

    def add(self, cell: Cell, way: str, repeat: int, values: dict[str, float], failure: str = "") -> None:
        """`values` by metric; of a sample that failed none, and the reason."""
        sample = {**self.about, **asdict(cell), "way": way, "repeat": repeat, "values": values, "failure": failure}
        with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(sample))  # behind a line that a kill has cut off, too

    def forget(self, cell: Cell, all_of_it: bool) -> None:
        """Measure all of the cell anew, or what failed of it."""
        wanted = self.about | asdict(cell)

        def goes(sample: dict) -> bool:
            return sample.items() >= wanted.items() and (all_of_it or has_failed(sample))

        kept = [each for each in self.kept() if not goes(each)]
        replace_text(self.folder / SAMPLES, "".join("\n" + json.dumps(each) for each in kept))

    def kept(self) -> list[dict]:
        """All whole lines of the file."""
        found = []
        if (self.folder / SAMPLES).exists():
            for line in (self.folder / SAMPLES).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # blank, or cut off by a kill
                    found.append(json.loads(line))
        return found

    def publish(self, cell: Cell, complete: bool) -> list[str]:
        """Put the cell's rows into bench.csv in the place of older ones. What is not `complete` replaces none that
        hold more: ways that were not measured now, or that were repeated more often. Returns these ways."""
        by_way = defaultdict(list)
        for (way, _), sample in self.taken(cell).items():
            by_way[way].append(sample)
        about = self.about | asdict(cell)
        rows = [about | {"way": way} | row for way, samples in by_way.items() for row in summary(samples)]
        of_cell = {"measurement": self.about["measurement"]}
        of_cell |= {name: str(value) for name, value in asdict(cell).items()}
        table = read_csv(self.folder / TABLE)
        before = [row for row in table if row.items() >= of_cell.items()]
        now = counts(rows)
        more = [] if complete else [way for way, repeats in counts(before).items() if repeats > now.get(way, 0)]
        if not more:
            write_csv(self.folder / TABLE, COLUMNS, [row for row in table if row not in before] + rows)
        return more


def has_failed(sample: dict) -> bool:
    """Otherwise than by being out of memory, which is an outcome. Of a row of bench.csv, too."""
    return bool(sample["failure"]) and not sample["failure"].startswith(OUT_OF_MEMORY)


def counts(rows) -> dict[str, int]:
    """way -> how often it was measured without failing."""
    found = {}
    for row in rows:
        if not has_failed(row):
            found[row["way"]] = max(found.get(row["way"], 0), int(row["repeats"]))
    return found


def near(taken: dict[tuple[str, int], dict], ways: tuple[str, ...]) -> tuple[str, ...]:
    """The ways of which some seconds have a median within `NEAR` times another way's."""
    values = pandas.DataFrame([{"way": way} | sample["values"] for (way, _), sample in taken.items() if way in ways])
    seconds, found = values.groupby("way").median().filter(like="_seconds"), set()
    for of_metric in (seconds[metric].dropna() for metric in seconds):
        for a, b in combinations(of_metric.index, 2):
            less, more = sorted((of_metric[a], of_metric[b]))
            found |= {a, b} if more <= NEAR * less else set()
    return tuple(way for way in ways if way in found)


def summary(samples: list[dict]) -> list[dict]:
    """One row a metric of one way's samples. Where some failed, the rows of the others say why as well; where all
    did, one row without a metric does."""
    failure = next((sample["failure"] for sample in samples if sample["failure"]), "")
    values = pandas.DataFrame([sample["values"] for sample in samples])
    if values.empty:
        return [{"failure": failure, "repeats": len(samples)}]
    return [
        {
            "metric": metric,
            "unit": UNITS.get(metric.rpartition("_")[2], ""),
            "median": f"{found.median():.10g}",
            "low": f"{found.min():.10g}",
            "high": f"{found.max():.10g}",
            "repeats": found.count(),
            "failure": failure,
        }
        for metric, found in values.items()
    ]
