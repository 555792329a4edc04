"""What vLLM holds on the trainer's device, where it generates in place of transformers."""

from dataclasses import replace

from rloo_memory.plan.setups import Setup
from rloo_memory.sizes import GIB

KIND = "vLLM"
AWAKE = ("load", "generate")  # phases in which a sleeping engine is awake: TRL's level 2 keeps no weights, no cache


def with_engine(setup: Setup, peaks: list) -> list:
    """`rloo_memory.plan.peaks.PredictedPeak`s with vLLM's share of the device in each phase in which it has it."""
    size = setup.vllm_bytes
    if not size:
        return peaks
    asleep = setup.vllm_enable_sleep_mode
    return [
        peak
        if asleep and peak.phase not in AWAKE
        else replace(peak, total=peak.total + size, kinds=peak.kinds | {KIND: size})
        for peak in peaks
    ]


def in_words(setup: Setup) -> str | None:
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
