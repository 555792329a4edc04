"""The range that a prediction stands for is what was measured, and so is how much faster sharing is said to be."""

import pytest

from experiments.checks.measured_ranges import errors_of
from experiments.config import ROOT
from rloo_memory.plan.__main__ import fits
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.setups import Setup


def test_what_is_said_of_errors_and_of_time_is_what_the_committed_results_say():
    assert measured_errors() == errors_of(ROOT / "results"), "run python -m experiments.checks.measured_ranges"
    assert measured_errors().low < 1 < measured_errors().high < 1.1 and measured_errors().peaks > 100


@pytest.mark.parametrize("size, verdict", [(9500, "short"), (10_300, "just"), (12_000, "yes")])
def test_a_peak_that_fits_by_less_than_the_error_is_said_to_just_fit(size, verdict):
    prediction = Prediction("stock", Setup(10), [PredictedPeak("train", 10_000, {}, 0)])
    assert fits(prediction, Room(size)).startswith(verdict)


def test_a_peak_that_fits_but_for_what_the_allocator_wastes_is_said_to_just_fit():
    """It wastes of what comes and goes, not of what stays."""
    kinds = {"parameters": 40, "gradients": 20, "activations": 40}
    prediction = Prediction("stock", Setup(10), [PredictedPeak("train", 100, kinds, 0)])
    assert [fits(prediction, Room(size, 0.33)).split()[0] for size in (99, 112, 130)] == ["short", "just", "yes"]
