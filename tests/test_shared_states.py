"""Prefix sharing for models with recurrent or convolutional states: what is refused. That they compute and train as
whole sequences do is in test_prefix_sharing.py."""

import pytest


@pytest.mark.torch
@pytest.mark.parametrize("called", ["cache", "cache_params", "past_key_values"])
def test_a_layer_with_a_state_is_known_by_its_cache_whatever_a_release_calls_it(called):
    """transformers 5.24 calls it `cache` everywhere."""
    from torch import nn

    from rloo_memory.prefix_sharing.states import find_mixers

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1d = nn.Conv1d(1, 1, 1)

    scope = {}
    exec(f"def forward(self, hidden_states, {called}=None): ...", scope)
    Mixer.forward = scope["forward"]
    model = nn.Sequential(Mixer(), nn.Linear(1, 1))
    assert find_mixers(model) == [model[0]]


@pytest.mark.slow
def test_what_cannot_be_shared_exactly_is_refused_and_left_as_it_was(probe):
    """Families, and then those that can be shared, with each way of handing their states over wrongly. With
    half-precision weights, that is noticed if a state is dropped."""
    result = probe("shared_states")
    refusals = result["refusals"]
    layers = {"jamba": "[0, 2]", "zamba": "[1, 3]", "zamba2": "[-1, 1, 3]", "zaya": "[0, 1]"}
    types = ("mamba", "mamba2", "falcon-mamba", "recurrent-gemma", "minimax")
    assert set(refusals) == {*layers, *types, "rwkv", "xlstm"}
    for name, message in refusals.items():
        assert message and "`prefix_sharing=False`" in message, name
        assert message.endswith(("| sdpa | 0 hooks", "| eager | 0 hooks")), (name, message)
    assert all(part in refusals[name] for name, part in layers.items()), refusals
    assert all("linear_attention" in refusals[name] for name in types), refusals
    assert all("AttentionInterface" in refusals[name] for name in ("rwkv", "xlstm")), refusals

    for what, refusals in result["broken"].items():
        assert len(refusals) == 12
        for name, message in refusals.items():
            short_convolution = name.startswith("lfm")
            if "recurrent" in what and short_convolution:
                assert message is None, "a short convolution has no recurrent state"
            elif not (what == "columns one off, bfloat16" and short_convolution):  # smaller than what is tolerated
                assert message and message.endswith("sdpa | 0 hooks"), (what, name, message)
