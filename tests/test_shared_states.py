"""Prefix sharing for models with recurrent or convolutional states. The probe runs in its own process with the fork's
TRL first on the path; what it measures is described there."""

import pytest
from rounding import is_no_larger

FAMILIES, WITHOUT_EXPERTS = 12, 6
# As for the models without states: float64 measures 2e-15, float32 1e-6 (gradients; 8e-8 elsewhere)
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_family_computes_what_whole_sequences_do(probe, dtype):
    result = probe("shared_states", f"exactness {dtype}")[dtype]
    assert len(result) == {"float64": FAMILIES, "float32": WITHOUT_EXPERTS}[dtype]
    for name, errors in result.items():
        worst = max(*errors["tokens"], *errors["gradient"], *errors["loss"])
        assert worst <= TOLERANCE[dtype], (dtype, name, errors)
        assert errors["off_is_equal"], f"{name}: prepared but not sharing, it computes something else"


@pytest.mark.torch
@pytest.mark.parametrize("called", ["cache", "cache_params", "past_key_values"])
def test_a_layer_with_a_state_is_known_by_its_cache_whatever_a_release_calls_it(called, shared_fork):
    """transformers 5.24 calls it `cache` everywhere."""
    from torch import nn
    from trl.prefix_sharing.states import find_mixers

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
def test_in_half_precision_the_error_is_no_larger_than_that_of_whole_sequences(probe):
    results = probe("shared_states", "exactness bfloat16", "exactness float32+bfloat16")
    for precision, result in results.items():
        assert len(result) == WITHOUT_EXPERTS
        for kind in ("tokens", "gradient"):
            for setting in range(3):  # passes of 3, of 9 tokens, of 2 with checkpointing
                ratios = {name: errors[kind][setting] / errors[f"stock_{kind}"] for name, errors in result.items()}
                assert is_no_larger(ratios), (precision, kind, setting, ratios)


@pytest.mark.slow
def test_every_family_decodes_as_whole_sequences_do(probe):
    result = probe("shared_states", "decoding float64")["float64"]
    assert len(result) == FAMILIES
    assert all(errors["shared"] <= TOLERANCE["float64"] for errors in result.values()), result


@pytest.mark.slow
def test_every_family_decodes_in_half_precision_with_no_more_error_than_whole_sequences(probe):
    precisions = ("bfloat16", "float32+bfloat16", "float32+float16")
    results = probe("shared_states", *(f"decoding {precision}" for precision in precisions))
    for precision in precisions:
        ratios = {name: errors["shared"] / errors["stock"] for name, errors in results[precision].items()}
        assert is_no_larger(ratios), (precision, ratios)


@pytest.mark.slow
def test_what_cannot_be_shared_exactly_is_refused_and_left_as_it_was(probe):
    """Families, and then those that can be shared, with each way of handing their states over wrongly. With
    half-precision weights, that is noticed if a state is dropped."""
    result = probe("shared_states", "refusals", "broken")
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
        assert len(refusals) == FAMILIES
        for name, message in refusals.items():
            short_convolution = name.startswith("lfm")
            if "recurrent" in what and short_convolution:
                assert message is None, "a short convolution has no recurrent state"
            elif not (what == "columns one off, bfloat16" and short_convolution):  # smaller than what is tolerated
                assert message and message.endswith("sdpa | 0 hooks"), (what, name, message)


@pytest.mark.slow
def test_random_batches_score_and_decode_as_whole_sequences(probe):
    tried = probe("shared_states", "shapes")["shapes"]
    assert len(tried) == 5 and min(tried.values()) >= 10, tried


@pytest.mark.slow
def test_many_passes_in_bfloat16_keep_the_gradient_of_the_prompt(probe):
    """64 passes each add to the gradient of the prompt's states. As for keys and values, it may cost one more rounding
    in mixed precision, and nothing but the noise of one sample with bfloat16 weights."""
    for name, result in probe("shared_states", "accumulation")["accumulation"].items():
        assert result["mixed shared"] <= 1.25 * result["mixed stock"], (name, result)
        assert result["shared"] <= 1.1 * result["accumulate"], (name, result)


@pytest.mark.slow
def test_training_runs_are_the_same(probe):
    """Three updates with sampled completions, in float64: the same tokens, logs and parameters to rounding."""
    result = probe("shared_states", "trainings")["trainings"]
    assert len(result) == 14
    for name, run in result.items():
        assert run["logs"] <= 1e-9 and run["parameters"] <= 1e-9, (name, run)
        assert (max(run["grad_norms"]) > 1e-3) is ("truncated" not in name), f"{name}: {run['grad_norms']}"
