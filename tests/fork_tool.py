"""trl/fork.py, which is a script beside no package, for the tests that use its functions."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "trl" / "fork.py"

spec = importlib.util.spec_from_file_location("fork", TOOL)
fork = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork)
LINES = fork.load_lines()


def obtain(line):
    """The upstream wheel of a line. Skips where there is none."""
    try:
        return fork.obtain(line)
    except fork.ForkError as error:
        pytest.skip(f"the upstream wheel cannot be obtained here: {error}")


def package(tree):
    """Every file of the package `trl` in a tree: path -> bytes."""
    files = (path for path in (tree / "trl").rglob("*.*") if path.suffix != ".pyc")
    return {str(path.relative_to(tree / "trl")): path.read_bytes() for path in files}
