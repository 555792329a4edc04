"""A training with prefix sharing that is stopped goes on from its checkpoint as stock does."""

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rloo", "grpo"])
def test_a_resumed_training_continues_as_if_it_had_not_stopped(probe, trainer):
    """Bit for bit, except where stock does not either, and there as stock does up to rounding. A checkpoint holds no
    completions: inside a generation new ones are made, and from there on at other updates. It holds no reference
    model, which matters where that one moves. And after the first epoch the order of its prompts comes again, because
    TRL's sampler does not know the epoch."""
    result = probe("resume", trainer)
    for name, run in result.items():
        assert run["updates"] in ([4, 5, 6], [3, 4, 5, 6]) and max(run["grad_norms"]) > 0.1, (name, run)
        if "stock" not in run:
            assert run["shared"] == {"logs": 0, "parameters": 0, "alone": []}, (name, run)
            continue
        assert max(run["stock"]["logs"], run["stock"]["parameters"]) > 1e-4, f"{name}: stock continues, so must shared"
        assert run["between"]["alone"] == [] and run["stock"]["alone"] == run["shared"]["alone"], (name, run)
        assert max(run["between"]["logs"], run["between"]["parameters"]) <= 2e-6, (name, run)
        assert (run["stock"]["alone"] == [4, 5, 6]) == name.endswith("inside a generation"), (name, run)
    assert {name for name, run in result.items() if "stock" in run} >= {f"{trainer} inside a generation"}
    if trainer == "rloo":  # with MemoryCallback: it goes on, and adds its three updates to the table of the six before
        assert result["rloo"]["memory"] == {"logged": [1, 2, 3, 4, 5, 6], "measured": 9}
