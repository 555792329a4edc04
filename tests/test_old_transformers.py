"""The fork where transformers is older than prefix sharing needs: who did not ask for it pays nothing."""

import pytest


@pytest.mark.slow
def test_trainings_without_the_options_need_no_newer_transformers_and_the_options_say_what_they_need(probe):
    result = probe("old_transformers")
    # OpenPrefix, which takes nothing from transformers
    assert result["imported"] == []
    needs = {"prefix_sharing": "5.13.0", "tokens_per_forward": "5.6.0"}
    upgrade = "Please upgrade transformers with `pip install --upgrade transformers`."
    assert result["said"] == 2 * [
        f"`{option}` requires transformers version {version} or higher, but 5.2.0 is installed. {upgrade}"
        for option, version in needs.items()
    ]
