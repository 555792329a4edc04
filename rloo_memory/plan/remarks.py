"""What a prediction says beside its numbers."""

from rloo_memory.plan import checkpoint, engine
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation import recurrent


def remarks(setup: Setup, hf_config, calibration=None) -> list[str]:
    """Of what is corrected, not predicted, or not as sure, one line each."""
    said = (
        calibration and calibration.in_words(),
        recurrent.note(hf_config, setup.device),
        checkpoint.in_words(hf_config, setup.device),
        engine.in_words(setup),
    )
    return [words for words in said if words]
