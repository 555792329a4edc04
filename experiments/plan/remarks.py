"""What a prediction says beside its numbers."""

from experiments.plan import checkpoint, engine, recurrent
from experiments.plan.setups import Setup

SCORES = (
    "float32 without autocast: on CUDA, attention with grouped keys holds all scores, which are not in the "
    "prediction; train with bf16: true, which keeps float32 weights"
)


def remarks(setup: Setup, hf_config) -> list[str]:
    """Of what is not predicted, or not as sure, one line each."""
    said = (
        recurrent.note(hf_config, setup.device),
        checkpoint.in_words(hf_config, setup.device),
        engine.in_words(setup),
        SCORES if setup.holds_scores(hf_config) else None,
    )
    return [words for words in said if words]
