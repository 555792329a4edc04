"""Settings of the launcher that are not TRL's own. Standard library only: the launcher's help needs nothing else."""

from dataclasses import dataclass, field


def setting(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class LaunchArguments:
    """Settings that are not TRL's own. What each does: the `help` of its field, which the launcher's help prints."""

    algorithm: str = setting("rloo", "rloo or grpo")
    dataset: str = setting(
        "builtin",
        "builtin (prompts from Python's own documentation), a .jsonl, .json, .csv or .parquet file with a column "
        "`prompt`, a folder of such files, or hub:owner/name",
    )
    reward: str | None = setting(
        None,
        "module:function or /path/file.py:function, called as TRL calls it; a reward model's folder, or "
        "hub:owner/name; or letters, which counts the letter e, for trying things out. Needed with a dataset; without "
        "one it is letters",
    )
    prompt_tokens: int = setting(256, "tokens of a built-in prompt")
    max_prompt_tokens: int | None = setting(
        None, "the longest prompt that the settings were planned for; a dataset with a longer one is refused"
    )
    offload_reference: bool = setting(False, "the reference model waits on the host except while it scores")
    offload_reward: bool = setting(False, "the reward model, likewise")
    memory_snapshot: str | None = setting(
        None, "peak or oom: dump torch's memory snapshot at a new peak, or when memory runs out (CUDA)"
    )
    host_allocator: str = setting("system", "malloc for host memory: system, tcmalloc or jemalloc")
    predict_memory: bool = setting(
        True, "predict the peak of each phase before the model loads; a training that does not fit is refused"
    )
    calibration: str | None = setting(
        None,
        "a file of corrections of the prediction, which rloo-memory plan --calibrate RUN_DIR... writes, or "
        "none; without it this machine's own, if there is one",
    )
    anyway: bool = setting(False, "train even if it is predicted not to fit, or beyond the model's rotary positions")
