"""docs/fit.json: sums that say what the planner says."""

import json

import pytest

from experiments.fitting import fit_check, fit_data
from experiments.record import read_csv


@pytest.mark.torch
@pytest.mark.parametrize("arm", ["stock", pytest.param("shared", marks=pytest.mark.slow)])
def test_sums_of_a_small_model_say_what_the_planner_says_at_other_lengths(arm):
    """Where no weights hide an error; longer than all that was simulated, and many completions."""
    from experiments.fitting import sums
    from rloo_memory import models
    from rloo_memory.plan.scale_up import extrapolate

    config = extrapolate.with_layers(models.shape_config("qwen3-8-layers", 4000), 2)
    setup = fit_data.TRAINED["lora"][1]
    phases, error = sums.sums_of(setup, config, arm, None)
    assert error < fit_data.MOST_ERROR
    for lengths in ((64_000, 700, 6), (400, 3000, 64), (900, 100, 128)):
        peaks = extrapolate.phase_peaks(sums.setup_at(setup, arm, lengths), config)
        for peak in peaks:
            formulas = sums.all_terms()
            at = dict(zip(formulas, sums.values(formulas, None, [lengths])[0], strict=True))
            found = [
                sum(size * at[term] for terms in stretch.values() for term, size in terms.items())
                for stretch in phases[peak.phase]
            ]
            assert max(found) == pytest.approx(peak.total, rel=fit_check.MOST_APART), (lengths, peak.phase)


@pytest.mark.torch
def test_the_planner_of_this_tree_still_says_what_the_page_says():
    data = json.loads(fit_data.PAGE.read_text())
    choices = fit_check.choices(data)
    on_several = [choice for choice in choices if choice["cards"] > 1 and choice["arm"] == "shared"]
    for choice in [*choices[:40:8], *on_several[:2]]:
        row = fit_check.row_of(choice, data)
        assert row["goes_whole"] or fit_check.apart(row) < fit_check.MOST_APART, choice


def test_at_200_random_choices_the_page_is_within_3_percent_of_the_planner():
    data, rows = json.loads(fit_data.PAGE.read_text()), read_csv(fit_check.TABLE)
    drawn = [tuple(str(choice[name]) for name in fit_check.CHOICE) for choice in fit_check.choices(data)]
    assert [tuple(row[name] for name in fit_check.CHOICE) for row in rows] == drawn
    assert {row["model"] for row in rows} == {model["name"] for model in data["models"]} == set(fit_data.MODELS)
    assert fit_check.compared(rows) == data["compared"] and data["compared"]["apart"] < fit_check.MOST_APART
