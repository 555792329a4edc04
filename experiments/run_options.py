"""The command lines of train, suite and their like: types of values, and the settings of a run."""

import argparse
import math
import re
from pathlib import Path

from rloo_memory.errors import ConfigError, shown
from rloo_memory.sizes import parse_bytes, size_hint


class Parser(argparse.ArgumentParser):
    """Reports a bad option as `ConfigError`, where argparse would print its usage as well and exit."""

    def error(self, message: str):
        raise ConfigError(f"{message}; see {self.prog} --help")


def whole(text: str) -> int:
    """An argparse type: a whole number of at most 40 digits."""
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number; write it like 4")
    return int(text)


def number(text: str) -> float:
    """An argparse type: a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a finite number; write it like 0.5")
    return value


def minutes(text: str) -> float:
    """An argparse type: after how many minutes nothing new is begun."""
    value = number(text)
    if not 0 <= value <= 10**6:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of minutes from 0 to 1,000,000")
    return value


def directory(text: str) -> Path:
    """An argparse type: a folder's path, which may have spaces and accents but has a name."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)} names no folder; write it like results")
    return Path(text)


def add_place(parser: argparse.ArgumentParser, device: str | None = "auto") -> None:
    """Where a run or a measurement is made, and where it is kept."""
    parser.add_argument("--device", default=device, help="auto (the default), cpu, cuda, cuda:N")
    parser.add_argument("--results", type=directory, help="holds one folder a machine; default: results of this clone")
    parser.add_argument("--machine", help="folder name below --results; default: from the device's name")


def add_minutes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=minutes, default=math.inf, help="begin nothing after that; the same command goes on later"
    )


# What train and suite have in common: settings of a run that are not left to its scale
OPTIONS = {
    "model": (str, "local folder or hub:owner/name; default: built here, random weights"),
    "documents": (str, "builtin, a file, a folder of .txt, or hub:owner/dataset[:split]"),
    "budget": (str, "memory that torch may allocate, such as 4GiB"),
    "steps": (whole, "rollouts"),
    "interval": (number, "of the memory sampler, in seconds"),
    "precision": (str, "float64, float32, bf16 (mixed) or bfloat16 (weights, too)"),
    "threads": (whole, "of torch on the CPU; default: one a core"),
    "batch": (whole, "completions per batch; default: one prompt's, as published"),
    "completions_per_forward": (whole, "arms with prefix sharing: how many go together; default 2"),
}  # fmt: skip
OF_ONE_RUN = {
    "prompt_tokens": (whole, "of each prompt, chat template included"),
    "completion_tokens": (whole, "of each completion"),
    "epochs": (whole, "over each rollout"),
    "seed": (whole, "default: 42 + repeat"),
    "vocab_size": (whole, "of the model that is built here"),
    "learning_rate": (number, "of Adam"),
    "temperature": (number, "of sampling"),
    "reward": (str, "model or letters"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser, options: dict) -> None:
    for name, (kind, text) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def overrides(args: argparse.Namespace, options: dict) -> dict:
    """The given `options` by the names of `RunConfig`. Raises `ConfigError` for a size that cannot be read."""
    given = {name: getattr(args, name) for name in options}
    size = given.pop("budget")
    budget = None if size is None else parse_bytes(size)
    if budget and budget < 2**20:
        raise ConfigError(f"--budget {size} is {budget:,} bytes, and a run needs a MiB at least{size_hint(size)}")
    return given | {"budget_bytes": budget}
