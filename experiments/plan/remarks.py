"""What a prediction says beside its numbers."""

from experiments.plan import checkpoint, engine, recurrent
from experiments.plan.setups import Setup


def remarks(setup: Setup, hf_config) -> list[str]:
    """Of what is not predicted, or not as sure, one line each."""
    said = (
        recurrent.note(hf_config, setup.device),
        checkpoint.in_words(hf_config, setup.device),
        engine.in_words(setup),
    )
    return [words for words in said if words]
