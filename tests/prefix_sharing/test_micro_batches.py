"""The completions of a prompt one by one, each with a backward of its own."""

import pytest

from experiments.checks.family_check import TOLERANCE, error_of, in_float64, run, run_micro_batches
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing

from .conftest import llama


@pytest.mark.parametrize("in_one_backward", [False, True])
class TestPrefixSharingMicroBatches:
    def test_frozen_below(self, in_one_backward):
        # No keys and values of the frozen layers have a gradient
        with in_float64():
            model = llama().requires_grad_(False)
            model.get_decoder().layers[-1].requires_grad_(True)
            truth = run(model)
            enable_prefix_sharing(model)
            found = run_micro_batches(model, in_one_backward=in_one_backward)
            assert max(error_of(found, truth)) <= TOLERANCE

    def test_loss_that_is_computed_twice(self, in_one_backward):
        with in_float64():
            model = llama()
            truth = run(model)
            enable_prefix_sharing(model)
            forward = model.forward

            def forward_twice(**kwargs):
                forward(**kwargs)  # whose loss has no backward
                return forward(**kwargs)

            model.forward = forward_twice
            found = run_micro_batches(model, in_one_backward=in_one_backward)
            assert max(error_of(found, truth)) <= TOLERANCE
