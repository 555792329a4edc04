"""The range that a prediction stands for is what was measured, and so is how much faster sharing is said to be."""

import pytest

from experiments.checks.measured_ranges import errors_of, times_faster_of
from experiments.config import ROOT
from experiments.record import write_csv
from rloo_memory.errors import ConfigError
from rloo_memory.plan.__main__ import fits
from rloo_memory.plan.accuracy.measured import MeasuredErrors, TimesFaster, measured_errors, times_faster
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.levers import cost_of_sharing
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.setups import Setup
from rloo_memory.sizes import GIB

COLUMNS = ("case", "phase", "predicted_bytes", "measured_bytes", "device_kind")


def test_the_range_spans_the_measured_peaks_of_all_machines(tmp_path):
    with pytest.raises(ConfigError, match="holds no"):
        errors_of(tmp_path)
    for machine, kind, ratios in (("a", "cpu", (0.9, 1.0)), ("b", "cuda", (1.1, 1.05))):
        (tmp_path / machine).mkdir()
        rows = [
            dict(zip(COLUMNS, ("stock", phase, 1000, round(1000 * ratio), kind), strict=True))
            for phase, ratio in zip(("score", "train"), ratios, strict=True)
        ]
        write_csv(tmp_path / machine / "plan_check.csv", COLUMNS, rows)
    errors = errors_of(tmp_path)
    assert errors == MeasuredErrors(0.9, 1.1, 4, 2, "CPU and a GPU")
    assert errors.range_of(10 * GIB) == (9 * GIB, 11 * GIB)
    assert errors.in_words(10 * GIB).startswith("10.00 GiB stands for 9.00 to 11.00: 4 measured peaks of 2 small ")


def test_a_peak_that_fits_by_less_than_the_error_is_said_to_just_fit():
    errors = measured_errors()
    assert errors.low < 1 < errors.high < 1.1 and errors.peaks > 100, "of the committed results"
    assert errors == errors_of(ROOT / "results"), "run python -m experiments.checks.measured_ranges"
    phases = [PredictedPeak("train", 10 * GIB, {}, 0), PredictedPeak("load", GIB, {}, 0)]
    prediction = Prediction("stock", Setup(10), phases)
    verdicts = [fits(prediction, Room(round(budget * GIB))) for budget in (9.5, 10, 10.3, 12)]
    assert verdicts == ["short by 0.50 GiB", "just", "just", "yes"] and fits(prediction, None) == ""


@pytest.mark.parametrize("size", [0, 1, 10**15])
def test_a_prediction_lies_in_its_range(size):
    low, high = measured_errors().range_of(size)
    assert low <= size <= high


def test_the_doctor_says_the_slowest_and_the_fastest_that_was_measured(tmp_path):
    assert list(times_faster()) == times_faster_of(ROOT / "results"), (
        "run python -m experiments.checks.measured_ranges"
    )
    with pytest.raises(ConfigError, match="with worth"):
        times_faster_of(tmp_path)
    columns = ("measurement", "metric", "model", "prompt_tokens", "completion_tokens", "k", "way", "median")
    seconds = {"whole": 12, "shared": 2, "shared-2": 3}
    for machine, slower in (("a", 1), ("b", 1.5)):
        rows = [("worth", "train_seconds", "wide", 3000, 100, 8, way, took) for way, took in seconds.items()]
        rows += [("worth", "score_seconds", "wide", 3000, 100, 8, "shared", 0.1)]
        rows[2] = (*rows[2][:-1], 3 * slower)
        (tmp_path / machine).mkdir()
        write_csv(tmp_path / machine / "bench.csv", columns, [dict(zip(columns, row, strict=True)) for row in rows])
    assert times_faster_of(tmp_path) == [TimesFaster(6.5, 2.667, 6.0)]


@pytest.mark.parametrize("prompt, completion, near", [(10_000, 10, 1), (1200, 100, 2), (10, 5000, 1)])
def test_sharing_costs_what_the_nearest_measured_lengths_took(prompt, completion, near):
    setup = Setup(prompt, max_completion_length=completion, num_generations=8)
    said = cost_of_sharing(setup)
    assert said.startswith(f"token ratio {setup.token_ratio:.1f}; ") and said.count("times as fast at") == near
