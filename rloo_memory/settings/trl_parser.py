"""TRL's own parser over TRL's settings and the launcher's; and the numbers that TRL would only stumble over late.

To be imported where `rloo_memory.fork.need_fork` has found the fork: this imports `trl`.
"""

import difflib
import functools
import re
import reprlib

from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from rloo_memory.errors import ConfigError
from rloo_memory.settings.arguments import LaunchArguments
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig, TrlParser

TRAINERS = {"rloo": RLOOConfig, "grpo": GRPOConfig}
MOST_SHOWN = 8  # mistakes of a file


class Parser(TrlParser):
    """Raises `ConfigError` in place of printing the usage of some 300 options."""

    def __init__(self, *classes):
        super().__init__(classes, conflict_handler="resolve", allow_abbrev=False)

    @property
    def names(self) -> set[str]:
        return {action.dest for action in self._actions}

    def error(self, message: str):
        raise ConfigError(re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message))

    def unknown(self, word: str) -> str:
        """What to say of a word, such as --name=value, that no setting of this parser has for a name."""
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in of_all_settings().names:
            return f"{name} is no setting of this algorithm here; leave it out"
        near = difflib.get_close_matches(name, self.names, n=1)
        return f"unknown setting {name!r}; {f'did you mean {near[0]}?' if near else 'TRL has none of that name'}"

    def value_of(self, name: str, value):
        """A value of a file, as a command line's would be read: text may be the number that it says, as YAML reads
        1e-6. Mappings and lists of them are left to TRL. Raises `ConfigError`."""
        if name not in self.names:
            raise ConfigError(self.unknown(name))
        if value is None and self.get_default(name) is not None:
            raise ConfigError(f"{name} has no value; write one or remove the line")
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, str | int | float) for part in parts):
            return value
        words = [f"--{name}={value}"] if parts == [value] else [f"--{name}", *map(str, parts)]
        read = getattr(self.parse_args(words), name)
        if problem := out_of_range(name, read):
            raise ConfigError(problem)
        # A truth for a setting of text, such as resume_from_checkpoint, and one word for a list of them mean the same
        as_it_is = isinstance(value, bool) and isinstance(read, str) or isinstance(value, str) and read == [value]
        return value if as_it_is else read


@functools.cache
def of_all_settings() -> Parser:
    """Of every setting that TRL's RLOO and GRPO scripts accept, and of the launcher's."""
    return Parser(
        DatasetMixtureConfig,
        RLOOScriptArguments,
        GRPOScriptArguments,
        *TRAINERS.values(),
        ModelConfig,
        LaunchArguments,
    )


def of(algorithm: str) -> Parser:
    """Of a training's own: the launcher's arguments, the config of its trainer and that of its model."""
    return Parser(LaunchArguments, TRAINERS[algorithm], ModelConfig)


def typed(settings: dict) -> dict:
    """Settings by name, each of its type. Raises `ConfigError` with what is wrong."""
    values, problems = {}, []
    for name, value in settings.items():
        try:
            values[name] = of_all_settings().value_of(name, value)
        except ConfigError as error:
            problems.append(str(error))
    if len(problems) > MOST_SHOWN:
        problems[MOST_SHOWN:] = [f"and {len(problems) - MOST_SHOWN} more"]
    if problems:
        raise ConfigError("; ".join(problems))
    return values


def out_of_range(name: str, value) -> str | None:
    """What is wrong with a number, by `RANGES`, or with a word, by `CHOICES`."""
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"{name} is {value!r}: choose one of {', '.join(CHOICES[name])}"
    for words, (inside, names) in RANGES.items():
        if name in names and isinstance(value, int | float) and not inside(value):
            return f"{name} is {reprlib.repr(value)}: it must be {words}"
    return None


# Where what TRL does with another number is nonsense or a late error
RANGES = {
    "at least 1": (
        lambda x: x >= 1,
        (
            "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations",
            "max_completion_length", "tokens_per_forward", "prompt_tokens", "max_prompt_tokens", "lora_r",
        ),
    ),
    "at least 2, as the baseline is made of the other completions, and at most 4096": (
        lambda x: 2 <= x <= 4096,
        ("num_generations",),
    ),
    "at least 1, or -1 for num_train_epochs": (lambda x: x == -1 or x >= 1, ("max_steps",)),
    "0 or more": (lambda x: x >= 0, ("learning_rate", "beta")),
    "above 0": (lambda x: x > 0, ("temperature", "num_train_epochs", "repetition_penalty")),
    "above 0, at most 1": (lambda x: 0 < x <= 1, ("top_p", "vllm_gpu_memory_utilization")),
    "from 0 to 1": (lambda x: 0 <= x <= 1, ("min_p",)),
    "from 0 to below 1": (lambda x: 0 <= x < 1, ("lora_dropout",)),
    "1: num_generations says how many completions a prompt has": (lambda x: x == 1, ("num_return_sequences",)),
}  # fmt: skip
# setting -> what it may be; TRL looks at loss_type only in the first update
CHOICES = {
    "algorithm": tuple(TRAINERS),
    "memory_snapshot": ("peak", "oom"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}
