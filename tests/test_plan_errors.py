"""The range that a prediction stands for is what was measured."""

import pytest

from experiments.config import ROOT
from experiments.evidence.measured_errors import errors_of
from experiments.record import write_csv
from rloo_memory.errors import ConfigError
from rloo_memory.plan.__main__ import fits
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.sureness.calibration import range_of
from rloo_memory.plan.sureness.measured import MeasuredErrors, measured_errors
from rloo_memory.plan.sureness.reserve import Room
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
    assert errors == errors_of(ROOT / "results"), "run python -m experiments.evidence.measured_errors"
    phases = [PredictedPeak("train", 10 * GIB, {}, 0), PredictedPeak("load", GIB, {}, 0)]
    assert range_of(phases) == (errors.range_of(10 * GIB)[0], 10 * GIB, errors.range_of(10 * GIB)[1])
    prediction = Prediction("stock", Setup(10), phases)
    verdicts = [fits(prediction, Room(round(budget * GIB))) for budget in (9.5, 10, 10.3, 12)]
    assert verdicts == ["short by 0.50 GiB", "just", "just", "yes"] and fits(prediction, None) == ""


@pytest.mark.parametrize("size", [0, 1, 10**15])
def test_a_prediction_lies_in_its_range(size):
    low, high = measured_errors().range_of(size)
    assert low <= size <= high
