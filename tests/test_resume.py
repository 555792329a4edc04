"""A training with prefix sharing that is stopped goes on from its checkpoint."""

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.slow
def test_a_resumed_training_continues_bit_for_bit_and_so_does_its_memory_log(probe):
    for name, run in probe("resume").items():
        assert run["logs"] == run["parameters"] == 0 and run["compared"] > 20, (name, run)
        assert run["memory"] == [1, 2, 3, 4, 5, 6], (name, run)
