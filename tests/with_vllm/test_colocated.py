"""vLLM in the trainer's process."""

import pytest
from comparison import faults
from training import CASES, train

COLOCATED = [
    "rloo", "grpo", "rloo, LoRA", "grpo, LoRA", "rloo, parts of groups", "grpo, parts of groups", "rloo, beta",
    "grpo, beta", "grpo, ratios truncated", "grpo, ratios not corrected", "grpo, two iterations", "grpo, token budget",
    "grpo, evaluation",
]  # fmt: skip


@pytest.mark.parametrize("name", COLOCATED)
def test_sharing_trains_the_same(name, qwen3, trl):
    off, on = (train(CASES[name], sharing, qwen3) for sharing in (False, True))
    assert not faults(off, on)


@pytest.mark.parametrize("name", ["rloo, images", "grpo, images, LoRA"])
def test_sharing_trains_the_same_on_images(name, gemma3, trl):
    """vLLM puts each image of Gemma 3 into the prompt once more: TRL hands it ids that have the image's tokens
    already. Its log-probabilities are those of another prompt then, with sharing and without."""
    off, on = (train(CASES[name], sharing, gemma3) for sharing in (False, True))
    assert not faults(off, on, log_probabilities=1.0)
