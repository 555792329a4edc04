"""What was measured: each sample in bench_samples.jsonl, and bench.csv, a row a number, which is published."""

import contextlib
import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from experiments.measuring import FACTS
from experiments.record import read_csv, write_csv
from experiments.run_record import APART

SAMPLES, TABLE = "bench_samples.jsonl", "bench.csv"
NEAR = 1.1  # times the seconds of another way: what takes more repeats to tell apart
COLUMNS = (
    "measurement", "model", "prompt_tokens", "completion_tokens", "k", "way", "metric", "unit", "median", "low",
    "high", "repeats", "failure", *FACTS,
)  # fmt: skip
UNITS = {"seconds": "s", "ms": "ms", "bytes": "bytes", "limit": "x"}  # by the last word of a metric


@dataclass(frozen=True)
class Cell:
    """What is measured in several ways: a model, and tokens of its prompt and of each of its k completions."""

    model: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    k: int | None = None

    def __str__(self) -> str:
        sizes = ("prompt", self.prompt_tokens), ("completion", self.completion_tokens), ("k", self.k)
        return ", ".join([self.model, *(f"{name} {number:,}" for name, number in sizes if number is not None)])


class Samples:
    """Samples of one measurement on one machine by this very code, each written as soon as it is taken."""

    def __init__(self, folder: Path, measurement: str, facts: dict[str, str]):
        self.folder, self.about = folder, {"measurement": measurement, **facts}

    def taken(self, cell: Cell) -> dict[tuple[str, int], dict]:
        """(way, repeat) -> the last sample of a cell. A line that a kill has cut off is none."""
        found, wanted = {}, self.about | asdict(cell)
        for line in lines(self.folder / SAMPLES):
            if line.items() >= wanted.items():
                found[line["way"], line["repeat"]] = line
        return found

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

    def forget(self, cell: Cell) -> None:
        """Take no sample of the cell up: measure all of it anew."""
        wanted = self.about | asdict(cell)
        kept = [line for line in lines(self.folder / SAMPLES) if not line.items() >= wanted.items()]
        (self.folder / SAMPLES).write_text("".join("\n" + json.dumps(line) for line in kept))

    def publish(self, cell: Cell) -> list[dict]:
        """Put the cell's rows into bench.csv in the place of older ones. Returns them."""
        by_way = defaultdict(list)
        for (way, _), sample in self.taken(cell).items():
            by_way[way].append(sample)
        about = self.about | asdict(cell)
        rows = [about | {"way": way} | row for way, samples in by_way.items() for row in summary(samples)]
        here = {name: "" if value is None else str(value) for name, value in asdict(cell).items()}
        here["measurement"] = self.about["measurement"]
        kept = [row for row in read_table(self.folder) if not row.items() >= here.items()]
        write_csv(self.folder / TABLE, COLUMNS, kept + rows)
        return rows


def near(taken: dict[tuple[str, int], dict], ways: tuple[str, ...]) -> tuple[str, ...]:
    """The ways of which some wall-clock seconds have a median within `NEAR` times another way's."""
    medians = defaultdict(dict)
    for way in ways:
        for row in summary([sample for (name, _), sample in taken.items() if name == way]):
            if row.get("unit") == "s" and "cpu" not in row["metric"]:
                medians[row["metric"]][way] = float(row["median"])
    pairs = [(took, pair) for took in medians.values() for pair in combinations(took, 2)]
    found = {way for took, (a, b) in pairs if max(took[a], took[b]) <= NEAR * min(took[a], took[b]) for way in (a, b)}
    return tuple(way for way in ways if way in found)


def lines(path: Path) -> list[dict]:
    """The whole lines of a file of samples; nothing where there is none."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # blank, or cut off
            found.append(json.loads(line))
    return found


def read_table(folder: Path) -> list[dict[str, str]]:
    """The rows of bench.csv; none where there is no such file."""
    return read_csv(folder / TABLE)


def summary(samples: list[dict]) -> list[dict]:
    """One row a metric of one way's samples. Where some failed, the rows of the others say why as well; where all
    did, one row without a metric does."""
    failure = next((sample["failure"] for sample in samples if sample["failure"]), "")
    values = defaultdict(list)
    for sample in samples:
        for metric, value in sample["values"].items():
            values[metric].append(value)
    if not values:
        return [{"failure": failure, "repeats": len(samples)}]
    return [
        {
            "metric": metric,
            "unit": UNITS.get(metric.rpartition("_")[2], ""),
            "median": f"{median(found):.10g}",
            "low": f"{min(found):.10g}",
            "high": f"{max(found):.10g}",
            "repeats": len(found),
            "failure": failure,
        }
        for metric, found in values.items()
    ]


def warn_of_outliers(cell: Cell, rows: list[dict]) -> None:
    """A line on stderr for seconds whose repeats are too far apart to compare anything with."""
    for row in rows:
        if row.get("unit") == "s" and float(row["high"]) > APART * float(row["low"]):
            print(
                f"{cell}, {row['way']}: {row['metric']} from {row['low']} to {row['high']} in {row['repeats']} "
                "repeats: the machine did other things, too; measure it again with --fresh",
                file=sys.stderr,
            )
