"""Prefix sharing for prompts with images. The probe runs in its own process with the fork's TRL first on the path."""

import pytest

FAMILIES = {
    "gemma3", "gemma4", "gemma4-blocks", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v", "internvl",
    "llava", "smolvlm",
}  # fmt: skip
ROWS_PER_PROMPT = 3
TOLERANCE = 1e-10  # relative, in float64, which has 1e-16 a step


def test_scores_and_gradients_are_those_of_whole_rows_and_each_image_is_encoded_once(probe):
    """Of all parameters, and of the vision tower alone, trained and frozen, with and without checkpointing."""
    result = probe("shared_images", "scores")
    assert result.keys() == FAMILIES
    for family, errors in result.items():
        assert errors["tower_gradient_norm"] > 1, f"{family}: no image matters, the test would be empty"
        assert max(*errors["tokens"], *errors["gradient"], *errors["tower_gradient"]) <= TOLERANCE, (family, errors)
        assert errors["encoded"] == pytest.approx([1 / ROWS_PER_PROMPT] * len(errors["encoded"])), (family, errors)


def test_decoding_gives_the_logits_of_whole_rows_and_each_image_is_encoded_once(probe):
    result = probe("shared_images", "decodes")
    assert result.keys() == FAMILIES
    for family, errors in result.items():
        assert max(errors["logits"]) <= TOLERANCE, (family, errors)
        assert errors["encoded"] == pytest.approx([1 / ROWS_PER_PROMPT] * len(errors["encoded"])), (family, errors)
