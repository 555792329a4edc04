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
        checkpoint.of_experts(setup, hf_config),
        of_half_precision(setup),
        f"ZeRO-{setup.zero_stage}: by formulas that were compared with no training" if setup.zero_stage else None,
        engine.in_words(setup),
    )
    return [words for words in said if words]


def of_half_precision(setup: Setup) -> str | None:
    """Of float16 where it costs memory, or does not train."""
    if setup.fp16 and setup.weight_bits < 16:
        return (
            "fp16 on quantized weights: TRL makes adapters bfloat16, and GradScaler refuses their gradients (pytorch "
            "issue 127176); with bf16: false and fp16: false it trains"
        )
    mixed = setup.dtype == "float16" and setup.autocast == "bfloat16" and not setup.keeps_float32
    return (
        "float16 weights with bf16: sums of both are float32; fp16: true keeps them half as large" if mixed else None
    )
