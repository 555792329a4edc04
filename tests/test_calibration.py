"""How a run of the launcher corrects what is predicted; of a real one: test_doctor.py."""

import json

import pandas
import pytest

from rloo_memory.errors import ConfigError
from rloo_memory.plan.accuracy.calibration import load

START, PREDICTED = 500, {"generate": 100, "train": 200, "optimizer": 150}
RECORD = {
    "device_kind": "cpu", "start_bytes": START, "predicted_peaks": PREDICTED, "predicted_prompt_tokens": 1000,
    "prompt_tokens": 990, "completion_tokens": 64, "settings": {"max_completion_length": 64},
}  # fmt: skip
OF_TINY = ["--model", "tiny-qwen3", "--prompt", 64, "--completion", 8, "--device", "cpu"]


def run_folder(folder, updates=(5, 1.2, 0.9), **changed):
    """A run whose phases took so many times what was predicted, by update."""
    sizes = [(phase, round(size * times)) for times in updates for phase, size in PREDICTED.items()]
    rows = [
        {"phase": phase, "start": i, "end": i + 0.5, "peak_resident_bytes": START + n, "peak_allocated_bytes": n}
        for i, (phase, n) in enumerate(sizes)
    ]
    pandas.DataFrame(rows).to_csv(folder / "memory_phases.csv")
    (folder / "memory.json").write_text(json.dumps(RECORD | changed))
    return folder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_factor_is_measured_over_predicted_from_the_second_update_on(tmp_path, device):
    found = load(run_folder(tmp_path, device_kind=device), device)
    assert found.factors == dict.fromkeys(PREDICTED, 1.2) and found.seconds == dict.fromkeys(PREDICTED, 0.5)


@pytest.mark.parametrize("changed, reason", [
    ({"device_kind": "cuda"}, "is a run on cuda"), ({"updates": (1,)}, "has no measured update after the first"),
    ({"predicted_peaks": {}}, "has no predictions"), ({"completion_tokens": 50}, "saw completions of 50 tokens"),
])  # fmt: skip
def test_a_run_that_says_nothing_is_refused_in_one_line(planned, tmp_path, changed, reason):
    result = planned(*OF_TINY, "--calibration", run_folder(tmp_path, **changed))
    assert result.returncode == 2 and result.stderr.startswith(f"plan: calibration {tmp_path} {reason}")


@pytest.mark.parametrize("name, text", [("memory.json", '{"arguments": {}}'), ("memory_phases.csv", "")])
def test_a_folder_that_is_cut_or_of_an_older_version_is_refused(tmp_path, name, text):
    run_folder(tmp_path).joinpath(name).write_text(text)
    with pytest.raises(ConfigError, match="no whole record .*; name an output folder of rloo-memory launch$"):
        load(tmp_path, "cpu")
