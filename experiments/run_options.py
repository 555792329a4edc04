"""The command lines of these programs."""

import argparse
from dataclasses import fields
from pathlib import Path

from experiments.config import RunConfig, option_name
from rloo_memory.errors import ConfigError
from rloo_memory.sizes import parse_bytes, size_hint


class Parser(argparse.ArgumentParser):
    """Of a module of experiments, whose docstring is its help; with `place`, the options that say where to run and
    where to keep it. Reports a bad option as `ConfigError`, where argparse would print its usage as well and exit."""

    def __init__(self, module: str, doc: str, place: bool = True):
        how = dict(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=f"python -m experiments.{module}", **how)
        if place:
            self.add_argument("--device", default="auto", help="auto (the default), cpu or cuda")
            self.add_argument("--results", type=Path, help="a folder for each machine is in it; default: this clone's")
            self.add_argument("--machine", help="folder name below --results; default: from the device's name")

    def add_fresh(self) -> None:
        self.add_argument("--fresh", action="store_true", help="repeat what this commit has measured here already")

    def error(self, message: str):
        raise ConfigError(f"{message}; see {self.prog} --help")


def whole(text: str) -> int:
    """An argparse type: a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write it like 4") from None


def size(text: str) -> int:
    """An argparse type: bytes."""
    try:
        found = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 2**20:
        raise argparse.ArgumentTypeError(f"{text} is {found:,} bytes, and a MiB is the least{size_hint(text)}")
    return found


def settings(leave_out: tuple[str, ...] = ()) -> list[str]:
    """The fields of `RunConfig` that are options, but those that a program asks for in its own way."""
    return [declared.name for declared in fields(RunConfig) if declared.name not in (*leave_out, "device")]


def add_settings(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    for declared in fields(RunConfig):
        if declared.name in settings(leave_out):
            kind = {"budget_bytes": size}.get(declared.name) or {int: whole, float: float}.get(declared.type, str)
            choices = declared.metadata["choices"]
            about = declared.metadata["about"] + (f": {', '.join(choices)}" if choices else "")
            parser.add_argument(
                option_name(declared.name), dest=declared.name, type=kind, choices=choices, help=about, metavar="..."
            )


def as_words(config: RunConfig) -> list[str]:
    """The options that ask for this very run."""
    values = {option_name(name): value for name, value in vars(config).items()}
    return [f"{name}={value}" for name, value in values.items() if value is not None]
