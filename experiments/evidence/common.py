"""What every measurement here needs: its options, where it runs, and a table that is never half."""

import argparse
import csv
import math
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from experiments import run_options
from experiments.config import ROOT
from experiments.record import make_writable, write_csv
from experiments.run_device import pick_device
from rloo_memory.commit import source_commit
from rloo_memory.device import machine_name
from rloo_memory.errors import ConfigError, choose

EXIT_VERDICT = 4  # measured to the end, and what was measured is not as it should be
EXIT_TIME = 5  # what fitted into --minutes is measured; the same command goes on from there
FACTS = ("device_kind", "device_name", "torch_version", "transformers_version", "commit")  # columns of every table


class Parser(run_options.Parser):
    """The options of all measurements. Raises `ConfigError` for what it refuses."""

    def __init__(self, name: str, doc: str, cpu_only: bool = False):
        super().__init__(prog=f"python -m experiments.evidence.{name}", description=doc)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        if cpu_only:
            self.set_defaults(device="cpu")
        else:
            self.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
        self.add_argument("--results", type=Path, default=ROOT / "results", help="holds one folder a machine")
        self.add_argument("--machine", help="folder name below --results; default: from the device's name")
        self.add_argument("--fresh", action="store_true", help="repeat what this commit has measured here already")


def minutes(text: str) -> float:
    """The type of an option that says after how long nothing new is begun."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10**6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of minutes from 0 to 1,000,000")
    return value


def whole(least: int, most: int = 100_000):
    """The type of an option that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most:,}")
        return int(text)

    return read


def words(kind: str, text: str, choices: Collection[str]) -> list[str]:
    """The comma-separated names of some `choices`. Raises `ConfigError` for an unknown one and for one said twice."""
    found = [choose(kind, word, choices) for word in text.split(",")]
    for word in found:
        if found.count(word) > 1:
            raise ConfigError(f"{kind} {word!r} is named twice; name it once")
    return found


def numbers(option: str, text: str) -> list[float]:
    """The comma-separated numbers of an option. Raises `ConfigError` for anything else and for one said twice."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)) or len(set(found)) < len(found):
        raise ConfigError(f"{option} {text!r}: write different numbers with commas between, like 0.01,0.05")
    return found


@dataclass(frozen=True)
class Place:
    """Where a measurement runs: "cpu" or "cuda", results/<machine>, and the values of `FACTS` for its rows."""

    device: str
    folder: Path
    facts: dict[str, str]


def place(args: argparse.Namespace, *also_needed: str) -> Place:
    """Raises `ConfigError` for a missing package or device, and for a folder that is none or cannot be written."""
    need("torch", "transformers", "accelerate", "datasets", *also_needed)
    if args.machine is not None and not re.fullmatch(r"\w[\w.-]*", args.machine):
        raise ConfigError(f"--machine {args.machine!r} is not a plain folder name; use letters, digits, '-', '_', '.'")
    device, device_name, _ = pick_device(args.device)
    folder = args.results / (args.machine or machine_name(device, device_name))
    make_writable(folder)
    values = (device, device_name, version("torch"), version("transformers"), source_commit())
    return Place(device, folder, dict(zip(FACTS, values, strict=True)))


def need(*packages: str) -> None:
    """Raises `ConfigError` that names all of `packages` that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"not installed for {sys.executable}: {', '.join(missing)}; run ./setup_env.sh (without a network: "
            "./setup_env.sh --offline DIR) and use .venv/bin/python"
        )


class Table:
    """Rows that belong together, in a CSV that is replaced only by a whole one.

    Until `finish`, rows lie in `<name>.csv.unfinished`, each written as soon as it is measured. So a killed run keeps
    its rows, and the next one goes on with those of the same `facts`: settings, device, versions and commit.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], facts: dict, fresh: bool):
        self.path, self.columns, self.facts = path, columns, facts
        self.unfinished = path.with_name(path.name + ".unfinished")
        self.rows: list[dict[str, str]] = []
        for known in () if fresh else (self.unfinished, path):
            self.rows = self.rows or [row for row in read_rows(known, columns) if is_same(row, facts)]

    def has(self, **values) -> bool:
        """Whether there is a row with these values."""
        return any(is_equal(row, values) for row in self.rows)

    def rows_with(self, **values) -> list[dict[str, str]]:
        return [row for row in self.rows if is_equal(row, values)]

    def missing(self, ways: Collection[str], repeats: int, **values) -> list[tuple[int, str]]:
        """(repeat, way) of the rows with these values that are not there yet, the ways alternating."""
        return [
            (repeat, way)
            for repeat in range(repeats)
            for way in ways
            if not self.has(**values, way=way, repeat=repeat)
        ]

    def add(self, *rows: dict) -> None:
        """Add rows, without `facts`, and write."""
        self.rows += [in_text(self.columns, {**row, **self.facts}) for row in rows]
        write_csv(self.unfinished, self.columns, self.rows)

    def finish(self) -> None:
        """All is measured: make it the table."""
        write_csv(self.unfinished, self.columns, self.rows)
        os.replace(self.unfinished, self.path)


def is_equal(row: dict[str, str], values: dict) -> bool:
    return all(row[name] == str(value) for name, value in values.items())


def is_same(row: dict[str, str], facts: dict) -> bool:
    """Whether a row was measured with these settings by this very code. Changed, uncommitted code never is."""
    return is_equal(row, facts) and facts["commit"] != "unknown" and not facts["commit"].endswith("-dirty")


def in_text(columns: tuple[str, ...], row: dict) -> dict[str, str]:
    return {name: "" if row.get(name) is None else str(row[name]) for name in columns}


def read_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV, none where there is no file. Raises `ConfigError` where it cannot be read.

    A row without a commit, the last column, was cut off by a kill and is left out."""
    try:
        with path.open(newline="") as file:
            return [in_text(columns, row) for row in csv.DictReader(file) if row.get("commit")]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {path} ({error}); move it away") from error
