"""The script in examples/ runs as it is, and what the guide says of whole groups is so."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_with_prefix_sharing.py"


def test_what_the_training_script_cannot_do_is_said_at_once(tmp_path):
    """From another folder. What it can do: test_tutorial.py."""
    result = subprocess.run([sys.executable, SCRIPT, "--k", "1"], cwd=tmp_path, capture_output=True, text=True)
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
