"""Settings of the launcher that are not TRL's own."""

from dataclasses import dataclass


@dataclass
class LaunchArguments:
    """Settings that are not TRL's own.

    Args:
        algorithm: "rloo" or "grpo".
        dataset: "builtin", a .jsonl, .csv or .parquet file or a folder with a column `prompt`, or hub:owner/name.
        reward: "letters" (the number of letters e, to try things out), module:function as TRL takes it, or a reward
            model: its folder, or hub:owner/name.
        prompt_tokens: length of the built-in prompts.
        max_prompt_tokens: tokens of the longest prompt that memory was planned for; None: not bounded.
        offload_reference: keep the reference model on the host except while it scores.
        offload_reward: the same with the reward model.
        memory_snapshot: "peak" or "oom", see `MemoryCallback`.
        host_allocator: "system", "tcmalloc" or "jemalloc": malloc for host memory, see `experiments.host_allocator`.
    """

    algorithm: str = "rloo"
    dataset: str = "builtin"
    reward: str = "letters"
    prompt_tokens: int = 256
    max_prompt_tokens: int | None = None
    offload_reference: bool = False
    offload_reward: bool = False
    memory_snapshot: str | None = None
    host_allocator: str = "system"
