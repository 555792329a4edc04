"""Liger's layers, in the environment of `make test-cuda`, which has Triton."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from experiments.config import ROOT

PROBE = ROOT / "tests" / "probes" / "liger_layers.py"


@pytest.mark.skipif(not find_spec("liger_kernel") or not find_spec("triton"), reason="needs liger-kernel and triton")
def test_shared_prompts_train_as_stock_does_with_ligers_layers():
    """In float32, whose rounding the order of sums changes: 2e-6 of an update, as far as Liger is from PyTorch."""
    # Triton decides when it is first imported
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, PROBE], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    runs = json.loads(run.stdout.splitlines()[-1])
    assert len(runs) == 4
    for found in runs.values():
        assert found["apart"] < 2e-6, runs
        assert {name.rpartition(".")[2] for name in found["layers"]} == {"rms_norm", "swiglu"}
