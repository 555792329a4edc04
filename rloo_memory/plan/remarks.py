"""What a prediction says beside its numbers."""

from rloo_memory.models import meta_model
from rloo_memory.plan import checkpoint
from rloo_memory.plan.setups import Setup, exceeded_positions
from rloo_memory.plan.simulation import recurrent
from rloo_memory.sizes import GIB


def remarks(setup: Setup, hf_config, calibration=None) -> list[str]:
    """Of what is corrected, not predicted, or not as sure, one line each."""
    said = (
        calibration and calibration.in_words(),
        recurrent.note(hf_config, setup.device),
        checkpoint.in_words(hf_config, setup.device),
        checkpoint.of_experts(setup, hf_config),
        of_length(setup, hf_config),
        of_small_passes(setup, hf_config),
        of_half_precision(setup, hf_config),
        f"ZeRO-{setup.zero_stage}: by formulas that were compared with no training" if setup.zero_stage else None,
        "use_liger_kernel: predicted with PyTorch's layers, not with Liger's" if setup.use_liger_kernel else None,
        of_engine(setup),
    )
    return [words for words in said if words]


def of_length(setup: Setup, hf_config) -> str | None:
    """Of more tokens than the model is made for, as with YaRN."""
    if (positions := exceeded_positions(setup, hf_config)) is None:
        return None
    length = setup.prompt_tokens + setup.max_completion_length
    return f"{length} tokens are more than the {positions} positions of the model's config: see to its rope_parameters"


def of_small_passes(setup: Setup, hf_config) -> str | None:
    """Of experts where prompts can be shared: the prediction counts what they compute and move, not how few rows."""
    if setup.num_generations < 3 or not checkpoint.expert_weights(meta_model(hf_config)):
        return None
    return "experts get few tokens each in small passes, and take longer than predicted: prefer large micro-batches"


def of_half_precision(setup: Setup, hf_config) -> str | None:
    """Of float16 where it costs memory, does not train, or is not what is planned."""
    if setup.fp16 and setup.weight_bits < 16:
        return (
            "fp16 on quantized weights: TRL makes adapters bfloat16, and GradScaler refuses their gradients (pytorch "
            "issue 127176); with bf16: false and fp16: false it trains"
        )
    words, own = {"float16": "fp16", "bfloat16": "bf16"}, str(hf_config.get_text_config().dtype).removeprefix("torch.")
    for weights, whose in ((setup.dtype, "weights"), (own, "weights in the checkpoint")):
        if {weights, setup.autocast} == set(words):
            sums = "" if setup.keeps_float32 or weights != setup.dtype else ", and sums of both are float32"
            return (
                f"{weights} {whose}, and planned is {words[setup.autocast]}: true{sums}; if you train with "
                f"{words[weights]}: true, plan that"
            )
    return None


def of_engine(setup: Setup) -> str | None:
    """What of vLLM or continuous batching is predicted; None where `generate` generates."""
    if not setup.use_vllm:
        said = "continuous batching: its cache, most of the memory that is free (max_memory_percent), is not counted"
        return said if setup.use_transformers_continuous_batching else None
    if setup.vllm_mode == "server":
        return "use_vllm: a server generates, on devices of its own, and nothing of it is counted here"
    share = f"{setup.vllm_gpu_memory_utilization:g} of the device"
    if setup.device != "cuda":
        return "use_vllm: what vLLM keeps on a CPU comes on top (VLLM_CPU_KVCACHE_SPACE, GiB, and its weights)"
    if not setup.vllm_bytes:
        return f"use_vllm: vLLM's share, {share}, comes on top; --device-memory counts it"
    when = "while it generates, asleep else" if setup.vllm_enable_sleep_mode else "throughout"
    return f"use_vllm: vLLM's share, {share}, {setup.vllm_bytes / GIB:.2f} GiB, is in it {when}"
