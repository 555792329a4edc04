"""The script in examples/ runs as it is, and what the guide says of whole groups is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_with_prefix_sharing.py"


def run(folder, *arguments):
    """From another folder, with untouched TRL installed: the script builds the fork of the clone that it lies in."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.sample  # of the tutorial
@pytest.mark.torch
def test_the_training_script_compares_with_and_without_sharing(tmp_path):
    result = run(tmp_path, "--compare", "--k", "4", "--steps", "1", "--algorithm", "grpo")
    assert result.returncode == 0, result.stderr[-3000:]
    line = r"prefix sharing {}: \d+\.\d\d s a step, peak [\d,]+ MiB (of the whole process|on the GPU)\n"
    assert re.fullmatch(line.format("off") + line.format("on"), result.stdout)


def test_what_the_training_script_cannot_do_is_said_at_once(tmp_path):
    result = run(tmp_path, "--k", "1")
    assert result.returncode == 2 and "--k 1" in result.stderr and "at least 2 completions" in result.stderr


@pytest.mark.torch
@pytest.mark.parametrize("trainer", [pytest.param("rloo", marks=pytest.mark.slow), "grpo"])
def test_a_batch_of_2_with_accumulation_trains_alike_shared_and_in_whole_groups(probe, trainer):
    """As docs/launch.md says it. The bound is float32's, in which norms, softmax and LM head compute."""
    result = probe("whole_groups", trainer)
    assert result["moved"] > 1e-3 and result["grad_norm"] > 0.1
    assert result["apart"].keys() == {"2 x 4", "4 x 2", "8 x 1"}
    for groups, apart in result["apart"].items():
        assert apart["logs"] < 2e-6 and apart["weights"] < 1e-6, (groups, apart)
