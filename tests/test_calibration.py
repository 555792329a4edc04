"""A run of the launcher corrects what is predicted."""

import json
import os
import subprocess
import sys

import pandas
import pytest
from small_profile import small_profile

from rloo_memory.plan.accuracy.calibration import load

pytestmark = pytest.mark.torch
START, PREDICTED = 500, {"generate": 100, "train": 200, "optimizer": 150}
RECORD = {
    "device_kind": "cpu", "start_bytes": START, "predicted_peaks": PREDICTED, "predicted_prompt_tokens": 1000,
    "prompt_tokens": 990, "completion_tokens": 64, "arguments": {"max_completion_length": 64},
}  # fmt: skip
OF_TINY = ["--model", "tiny-qwen3", "--prompt", 64, "--completion", 8, "--device", "cpu"]


def run_folder(folder, updates=(5, 1.2, 0.9), **changed):
    """A run whose phases took so many times what was predicted, by update."""
    sizes = [(phase, round(size * times)) for times in updates for phase, size in PREDICTED.items()]
    rows = [{"phase": phase, "peak_resident_bytes": START + n, "peak_allocated_bytes": n} for phase, n in sizes]
    pandas.DataFrame(rows).to_csv(folder / "memory_phases.csv")
    (folder / "memory.json").write_text(json.dumps(RECORD | changed))
    return folder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_factor_is_measured_over_predicted_from_the_second_update_on(tmp_path, device):
    assert load(run_folder(tmp_path, device_kind=device), device).factors == dict.fromkeys(PREDICTED, 1.2)


@pytest.mark.parametrize("changed, reason", [
    ({"device_kind": "cuda"}, "is a run on cuda"), ({"updates": (1,)}, "has no measured update after the first"),
    ({"predicted_peaks": {}}, "has no predictions"), ({"completion_tokens": 50}, "saw completions of 50 tokens"),
])  # fmt: skip
def test_a_run_that_says_nothing_is_refused_in_one_line(planned, tmp_path, changed, reason):
    result = planned(*OF_TINY, "--calibration", run_folder(tmp_path, **changed))
    assert result.returncode == 2 and result.stderr.startswith(f"plan: calibration {tmp_path} {reason}")


@pytest.mark.slow
def test_a_run_corrects_its_own_prediction_to_what_it_measured(planned, tmp_path):
    (tmp_path / "profile.yaml").write_text(small_profile(4, 8, prompt_tokens=128, max_steps=3))
    words = ("--model_name_or_path", "random:tiny-qwen3", "--output_dir", tmp_path / "run")
    command = [sys.executable, "-m", "rloo_memory.launch", tmp_path / "profile.yaml", *words]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    found, run = load(tmp_path / "run", "cpu"), json.loads((tmp_path / "run" / "memory.json").read_text())
    rows = pandas.read_csv(tmp_path / "run" / "memory_phases.csv")
    measured = rows[(rows.phase == "train") & (rows.step > 1)].peak_resident_bytes.max() - run["start_bytes"]
    assert found.factors["train"] * run["predicted_peaks"]["train"] == pytest.approx(measured)
    result = planned(*OF_TINY, "--calibration", tmp_path / "run")
    assert result.returncode == 0 and f"what {tmp_path}/run measured: generate x " in result.stdout
