"""Settings of the launcher beside TRL's trainer's. Standard library only: the launcher's help needs nothing else."""

from dataclasses import dataclass, field


def setting(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class LaunchArguments:
    """What is trained on what, under the names of TRL's script arguments, of which it has those that the launcher
    follows; then what TRL has no setting for. What each does: the `help` of its field, which the launcher prints."""

    dataset_name: str = setting(
        "builtin",
        "builtin (prompts from Python's own documentation), a .jsonl, .json, .csv or .parquet file with a column "
        "`prompt`, a folder of such files, or hub:owner/name",
    )
    dataset_config: str | None = setting(None, "the configuration of a dataset that has several")
    dataset_train_split: str = setting("train", "the split to train on")
    reward_funcs: list[str] | None = setting(
        None,
        "functions, one or more: module:function, module.function or /path/file.py:function, called as TRL calls "
        "them; TRL's own, such as accuracy_reward; or letters, which counts the letter e, for trying things out. "
        "Needed with a dataset, unless there is a reward model; without a dataset it is letters",
    )
    reward_model_name_or_path: str | None = setting(None, "a reward model's folder, or hub:owner/name")
    algorithm: str = setting("rloo", "rloo or grpo")
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
        None, "the output folder of a run on such a device, which corrects the prediction: a factor a phase"
    )
    anyway: bool = setting(False, "train even if it is predicted not to fit")

    def __post_init__(self):
        if isinstance(self.reward_funcs, str):  # one, in a file
            self.reward_funcs = [self.reward_funcs]


@dataclass
class TrainerAdditions:
    """What the launcher's trainers have beside TRL's settings."""

    prefix_sharing: bool = setting(False, "each prompt is computed once for all its completions")
    tokens_per_forward: int | None = setting(None, "how many tokens go through the model together")
    activation_offloading: bool = setting(False, "what the backward needs waits on the host; needs a GPU")
