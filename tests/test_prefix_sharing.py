"""Prefix sharing on every architecture, against whole rows. The probes run in their own processes."""

import pytest
from rounding import is_no_larger

# Relative error that rounding explains: float32 has 6e-8 a step and the gradients of three layers sum some thousand of
# them; float64 has 1e-16.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
EXPERTS = ("mixtral", "gpt-oss-sinks")
# Stock's own gradient in float32 is up to 3e-4 away from float64, by batch, as sharing is: rounding errors grow a
# thousandfold on the way
ILL_CONDITIONED = {"float32": ("gemma4-layer-embeddings",), "float64": ()}


# By kind of model: how many are tried in float64, and how many in other precisions
NUMBERS = {"attention": (34, 10), "states": (12, 6)}
UNMERGED = {"gemma2-window-softcap", "deepseek-latents", "phi3-longrope", "kimi-linear"}
of_each_kind = pytest.mark.parametrize("kind", NUMBERS)


@of_each_kind
def test_every_architecture_computes_what_whole_sequences_do(probe, kind):
    results = probe("shared_exactness", kind, *TOLERANCE)
    assert tuple(len(results[dtype]) for dtype in ("float64", "float32")) == NUMBERS[kind]
    for dtype, result in results.items():
        for name, errors in result.items():
            worst = max(*errors["tokens"], *errors["gradient"], *errors["loss"])
            assert worst <= TOLERANCE[dtype] * (50 if name in ILL_CONDITIONED[dtype] else 1), (dtype, name, errors)
            assert errors["off_is_equal"], f"{name}: prepared but not sharing, it computes something else"


@pytest.mark.slow
@of_each_kind
def test_in_half_precision_the_error_is_no_larger_than_that_of_whole_sequences(probe, kind):
    """Half-precision weights against the same rounded weights in float64; mixed precision against float32."""
    results = probe("shared_exactness", kind, "bfloat16", "float32+bfloat16")
    for precision, result in results.items():
        for of in ("tokens", "gradient"):
            for setting in range(2):  # passes of 9 tokens, of 16 with checkpointing
                ratios = {name: errors[of][setting] / errors[f"stock_{of}"] for name, errors in result.items()}
                assert len(ratios) == NUMBERS[kind][1]
                assert is_no_larger(ratios, EXPERTS), (precision, of, setting, ratios)
        assert all(errors["off_is_equal"] for errors in result.values())


@pytest.mark.slow
@of_each_kind
def test_every_architecture_decodes_with_no_more_error_than_whole_sequences(probe, kind):
    """Logits of forced tokens against float64, the last two in mixed precision (TRL's default)."""
    results = probe("shared_decoding", kind, "bfloat16", "float32+bfloat16", "float32+float16")
    for precision, result in results.items():
        ratios = {name: errors["shared"] / errors["stock"] for name, errors in result.items()}
        assert len(ratios) == NUMBERS[kind][1] and is_no_larger(ratios, EXPERTS), (precision, ratios)


@of_each_kind
def test_every_architecture_decodes_what_whole_sequences_do(probe, kind):
    """Logits in float64, far behind the prompts and past the windows. Attention is merged except where the model's own
    has soft-capping, where keys and values have other sizes, and where prompts are not shared (longrope)."""
    result = probe("shared_decoding", kind, "float64")["float64"]
    assert len(result) == NUMBERS[kind][0]
    assert {name: errors for name, errors in result.items() if errors["shared"] > 1e-10} == {}
    unmerged = {name for name, errors in result.items() if errors["merged"] == 0}
    assert unmerged == UNMERGED & result.keys()


def test_a_decoded_token_reads_each_key_once_copies_none_and_takes_few_operations(probe):
    """Views are not counted. Prompts of one length are read in one call. Four of different lengths take three calls
    more, and two operations that put their outputs together."""
    for name, result in probe("shared_steps").items():
        stock, shared = result["stock"], result["shared"]
        assert shared["operations"] <= 1.25 * stock["operations"], (name, result)
        assert stock["read"] == stock["expected"] and shared["read"] == shared["expected"], (name, result)
        assert shared["concatenated"] <= 0.1 * stock["concatenated"], (name, result)


@pytest.mark.slow
def test_many_passes_in_bfloat16_keep_the_gradient_of_the_prompt(probe):
    """64 passes each add to the gradient of the prompt's keys. With bfloat16 weights that is no worse than stock with
    64 accumulated steps. In mixed precision it may cost one more rounding: the sum over the completions is rounded
    once on its way into the projection, where stock rounds each completion's part and averages over them."""
    result = probe("shared_accumulation")
    assert result["shared"] <= result["accumulate"], result
    assert result["micro-batches"] <= result["accumulate"], result
    assert max(result["mixed shared"], result["mixed micro-batches"]) <= 1.25 * result["mixed stock"], result


@pytest.mark.slow
def test_random_batches_score_and_decode_as_whole_sequences(probe):
    tried = probe("shared_shapes")
    assert len(tried) == 4 and tried.pop("windows") >= 60 and min(tried.values()) >= 10, tried


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rloo", "grpo"])
def test_training_runs_are_the_same_in_every_setting(probe, trainer):
    """Two updates or three with sampled completions, in float64: the same tokens, logs and parameters to rounding."""
    result = probe("shared_trainer", trainer)
    assert len(result) >= 15
    for name, run in result.items():
        assert "error" not in run, (name, run)
        assert run["logs"] <= 1e-9 and run["parameters"] <= 1e-9, (name, run)
        if " alike, " in name:  # of several prompts, what they begin with went through the model by itself
            assert (run["starts"] > 0) != name.endswith("one prompt an update"), (name, run)
        goes_whole = " short, " in name or " whole rows" in name
        assert run["whole" if goes_whole else "shared"] > 2 * run["shared" if goes_whole else "whole"], (name, run)
        assert (max(run["grad_norms"]) > 1e-3) != name.endswith("all truncated"), f"{name}: {run['grad_norms']}"


def test_while_generating_the_prompts_keys_and_values_are_alive_once(probe):
    result = probe("shared_memory")
    assert len(result["steps"]) == 5
    assert all(step["alive"] == step["cache"] == step["expected"] for step in result["steps"]), result

    # A layer that slides keeps a window, and room for some tokens
    assert len(result["kept"]) == 3 * result["window"]
    assert max(prompt for prompt, _ in result["kept"]) == result["window"] and result["kept"][-1][0] == 0, result
    assert max(own for _, own in result["kept"]) < result["window"] + 4, result


def test_what_waits_for_the_backward_does_not_grow_with_the_passes_on_the_device_if_it_is_offloaded(probe):
    """Per completion, with three and six layers: the inputs of layers are on the device where passes are neither
    computed again nor offloaded, else not. TRL's own code moves what the planner says, to the byte."""
    result = probe("offloaded_passes")
    of_a_layer = result["bytes of a token"] * result["tokens of a completion"]
    for place, ways_that_keep in ((0, {"kept"}), (1, {"TRL", "TRL, streams", "planner"})):
        for way, alive in result["alive"].items():
            three, six = ((alive[layers]["12"][place] - alive[layers]["4"][place]) / 8 for layers in ("3", "6"))
            assert six - three == (3 * of_a_layer if way in ways_that_keep else 0), (way, place, result)
    assert result["alive"]["planner"] == result["alive"]["TRL, streams"]


def test_bad_input_is_refused_with_value_limit_and_remedy(probe):
    """Settings, adapters, empty prompts, and what a model is left as that was refused or failed: the patch's own tests
    (checks, faithful, failures)."""
    result = probe("shared_refusals")
    assert result["cases"] == 19 and result["otherwise"] == {}
