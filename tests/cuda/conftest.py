"""Tests on the emulated device, of `make test-cuda`: programs run on it, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import device
import pytest

PROBES = Path(__file__).parent / "probes"
# Triton's kernels compute on the host: its interpreter runs them in Python
INTERPRETED = {"TRITON_INTERPRET": "1", "TORCH_DISABLE_NATIVE_JIT": "1"}


@pytest.fixture(scope="session")
def on_device(tmp_path_factory):
    """Runs a program (words behind `python`) on the device; returns exit code, output, and the lines of its report."""

    def run(*words, timeout=900, cwd=device.ROOT, **settings):
        path = tmp_path_factory.mktemp("device") / "report.json"
        result = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, words)],
            cwd=cwd, capture_output=True, text=True, timeout=timeout,
            env=device.environment(**{"report": path, **settings}),
        )  # fmt: skip
        lines = path.read_text().splitlines() if path.exists() else []
        reports = [json.loads(line) for line in lines]
        return SimpleNamespace(code=result.returncode, out=result.stdout, err=result.stderr, reports=reports)

    return run


@pytest.fixture(scope="session")
def probe(on_device):
    """Runs probes/NAME.py; returns what it printed, a value a line of JSON."""

    def run(name, *arguments, **settings):
        result = on_device(PROBES / f"{name}.py", *arguments, **settings)
        assert result.code == 0, result.err[-3000:]
        return [json.loads(line) for line in result.out.splitlines() if line[:1] in "[{"]

    return run
