"""What every measurement and check needs: where it runs, and how it ends."""

import argparse
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from experiments.commit import source_commit
from experiments.record import make_writable
from experiments.run_device import machine_folder, pick_device
from rloo_memory.errors import ConfigError, choose

EXIT_VERDICT = 4  # measured to the end, and what was measured is not as it should be
FACTS = ("device_kind", "device_name", "torch_version", "transformers_version", "commit")  # columns of every table


def words(kind: str, text: str, choices: Collection[str]) -> list[str]:
    """The comma-separated names of some `choices`. Raises `ConfigError` for an unknown one and for one said twice."""
    found = [choose(kind, word, choices) for word in text.split(",")]
    for word in found:
        if found.count(word) > 1:
            raise ConfigError(f"{kind} {word!r} is named twice; name it once")
    return found


@dataclass(frozen=True)
class Place:
    """Where a measurement runs: "cpu" or "cuda", results/<machine>, and the values of `FACTS` for its rows."""

    device: str
    folder: Path
    facts: dict[str, str]


def place(args: argparse.Namespace) -> Place:
    """Raises `ConfigError` for a missing device, and for a folder that is none or cannot be written."""
    device, device_name = pick_device(args.device)
    folder = machine_folder(args, device, device_name)
    make_writable(folder)
    values = (device, device_name, version("torch"), version("transformers"), source_commit())
    return Place(device, folder, dict(zip(FACTS, values, strict=True)))


def need(*packages: str) -> None:
    """Raises `ConfigError` that names all of `packages` that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"not installed for {sys.executable}: {', '.join(missing)}; run ./setup_env.sh and use .venv/bin/python"
        )
