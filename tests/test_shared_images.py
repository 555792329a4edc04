"""Prefix sharing for prompts with images. The probes run in their own processes."""

import pytest
from rounding import is_no_larger

from experiments.checks.model_families import WITH_IMAGES

FAMILIES = {
    "gemma3", "gemma4", "gemma4-blocks", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "glm4v",
    "internvl", "llava", "smolvlm",
}  # fmt: skip
ROWS_PER_PROMPT = 3
TOLERANCE = 1e-10  # relative, in float64, which has 1e-16 a step


def test_the_page_of_model_families_names_those_tried_with_images():
    tried = {name.replace("_", "").replace(".", "") for name in WITH_IMAGES}
    assert tried == {name.replace("-", "").replace(".", "") for name in FAMILIES - {"gemma4-blocks"}}


def test_scores_and_gradients_are_those_of_whole_rows_and_each_image_is_encoded_once(probe):
    """Of all parameters, and of the vision tower alone, trained and frozen, with and without checkpointing."""
    result = probe("shared_images", "scores")
    assert result.keys() == FAMILIES
    for family, errors in result.items():
        assert errors["tower_gradient_norm"] > 1, f"{family}: no image matters, the test would be empty"
        assert max(*errors["tokens"], *errors["gradient"], *errors["tower_gradient"]) <= TOLERANCE, (family, errors)
        assert errors["encoded"] == pytest.approx([1 / ROWS_PER_PROMPT] * len(errors["encoded"])), (family, errors)


@pytest.mark.slow
def test_decoding_gives_the_logits_of_whole_rows_and_each_image_is_encoded_once(probe):
    result = probe("shared_images", "decodes")
    assert result.keys() == FAMILIES
    for family, errors in result.items():
        assert max(errors["logits"]) <= TOLERANCE, (family, errors)
        assert errors["encoded"] == pytest.approx([1 / ROWS_PER_PROMPT] * len(errors["encoded"])), (family, errors)


@pytest.mark.slow
def test_in_half_precision_the_error_is_no_larger_than_that_of_whole_rows(probe):
    """bfloat16 weights against the same rounded weights in float64."""
    families = ("gemma3", "gemma4-blocks", "qwen2.5-vl", "qwen3.5", "internvl", "smolvlm")
    result = probe("shared_images", "half-precision", *families)
    for kind in ("tokens", "gradient", "tower_gradient"):
        assert is_no_larger({family: ratios[kind] for family, ratios in result.items()}), (kind, result)


def test_what_cannot_be_shared_is_refused_with_the_place_and_a_remedy(probe):
    """Images in completions and inputs that nobody knows: the patch's own tests."""
    result = probe("shared_images", "refusals")
    expected = {
        "no counts": ["num_images"],
        "positions": ["position_ids"],
        "generation behind an image": ["prompt of row 1", "ends with an image", "text behind the image"],
        "more images than counted": ["`pixel_values` has 5 entries", "4 rows"],
        "sharded, a prompt without an image": ["prompt of row 3", "FSDP", "prefix_sharing=False"],
    }
    assert result.pop("fine") is None
    assert result.keys() == expected.keys()
    for name, words in expected.items():
        assert all(word in (result[name] or "") for word in words), (name, result[name])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rloo", "grpo"])
def test_training_runs_are_the_same_and_encode_each_prompts_images_once(probe, trainer):
    """Two updates or three in float64 with sampled completions, four a prompt: the policy, its old log-probabilities,
    the reference and generation. Stock encodes every image four times in each of them."""
    result = probe("shared_images_trainer", trainer)
    assert len(result) == {"rloo": 8, "grpo": 5}[trainer]
    for name, run in result.items():
        assert "error" not in run, (name, run)
        assert run["logs"] <= 1e-9 and run["parameters"] <= 1e-9, (name, run)
        assert run["encoded"] == (pytest.approx(1 / 4) if "text alone" not in name else None), (name, run)
        assert max(run["grad_norms"]) > 1e-3, (name, run)
    # Behind what all prompts begin with, but where tokens of an image see those behind them
    assert {name for name, run in result.items() if run["starts"]} == {
        "rloo": {"rloo qwen3-vl, some without", "rloo qwen3-vl, one of 4 a micro-batch"},
        "grpo": {"grpo internvl, two of 4 a micro-batch"},
    }[trainer]
