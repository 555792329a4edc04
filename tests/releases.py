"""TRL as released, in versions beside the one that is installed."""

import subprocess
import sys

import pytest

from experiments.config import ROOT
from rloo_memory.storage import new_folder


def release(version: str):
    """The folder of that version, from PyPI. Skips where it cannot be obtained."""
    there = ROOT / ".build" / "released" / version
    if not there.exists():
        with new_folder(there) as folder:  # another test may be at it
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            command = [*pip, "--target", folder, f"trl=={version}"]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"trl {version} cannot be obtained here")
    return there
