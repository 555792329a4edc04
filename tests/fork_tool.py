"""trl/fork.py, which is a script beside no package, for the tests that use its functions."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location("fork", ROOT / "trl" / "fork.py")
fork = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork)
LINES = fork.load_lines()


def obtain(line):
    """The upstream wheel of a line. Skips where there is none."""
    try:
        return fork.obtain(line)
    except fork.ForkError as error:
        pytest.skip(f"the upstream wheel cannot be obtained here: {error}")


def files(folder):
    """path -> bytes"""
    found = ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    return {name: path.read_bytes() for name, path in found if "__pycache__" not in name}
