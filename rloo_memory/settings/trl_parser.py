"""TRL's own parser over TRL's settings and the launcher's; and the numbers that TRL would only stumble over late.

To be imported where `rloo_memory.installed_trl.need_trl` has found it: this imports `trl`.
"""

import difflib
import functools
import math
import re
from dataclasses import dataclass

from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

import trl
from rloo_memory.errors import ConfigError
from rloo_memory.plan import setups
from rloo_memory.plan.ranges import ABOVE_0, AT_LEAST_1, DROPOUT, NOT_NEGATIVE, Range
from rloo_memory.prefix_sharing.config import check_passes_config
from rloo_memory.settings.arguments import LaunchArguments, TrainerAdditions
from trl import DatasetMixtureConfig, ModelConfig, TrlParser


@dataclass
class Sharing(TrainerAdditions):
    def __post_init__(self):
        super().__post_init__()
        if self.prefix_sharing or self.tokens_per_forward is not None:
            check_passes_config(self)


@dataclass
class RLOOConfig(Sharing, trl.RLOOConfig):
    pass


@dataclass
class GRPOConfig(Sharing, trl.GRPOConfig):
    pass


TRAINERS = {"rloo": RLOOConfig, "grpo": GRPOConfig}
FROM_FILES_ALONE = ("reward_clip_range",)  # two numbers, which TRL reads from no command line
TEXT_OR_TRUTH = ("resume_from_checkpoint",)


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
        """A value of a file, read as a command line's would be: YAML takes 1e-6 for text. Mappings are left to TRL."""
        if (meant := name.replace("-", "_")) != name and meant in self.names:
            raise ConfigError(f"unknown setting {name!r}; write {meant}")
        if name not in self.names:
            raise ConfigError(self.unknown(name))
        if value is None and self.get_default(name) is not None:
            raise ConfigError(f"{name} has no value; write one or remove the line")
        parts = value if isinstance(value, list) else [value]
        is_plain = parts and all(isinstance(part, str | int | float) for part in parts)
        if not is_plain or name in FROM_FILES_ALONE or name in TEXT_OR_TRUTH and isinstance(value, bool):
            return value
        action = self._option_string_actions[f"--{name}"]
        if value is parts and not action.nargs:
            raise ConfigError(f"{name} is {value}: it must be one value")
        has_truth = name not in TEXT_OR_TRUTH and any(isinstance(part, bool) for part in parts)
        read = None if has_truth and action.choices else self.read(name, value)
        if has_truth and not isinstance(read, bool):
            raise ConfigError(
                f"{name} is {value}, which YAML reads for no, off, yes and on: put quotes around the word"
            )
        if problem := out_of_range(name, read):
            raise ConfigError(problem)
        return value if isinstance(value, str) and read == [value] else read  # one word is a list of it

    def read(self, name: str, value):
        """What a command line that says so comes to."""
        words = [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
        return getattr(self.parse_args(words), name)


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
    return {name: of_all_settings().value_of(name, value) for name, value in settings.items()}


def out_of_range(name: str, value) -> str | None:
    """What is wrong with a number, which must be finite and in its one of `RANGES`, or with a word, by `CHOICES`."""
    for part in value if isinstance(value, list | tuple) else [value]:
        limitless = part == math.inf and name in UNLIMITED or part == -math.inf and name == "reward_clip_range"
        if isinstance(part, float) and not math.isfinite(part) and not limitless:
            return f"{name} is {part}: it must be a finite number"
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"{name} is {value!r}: choose one of {', '.join(CHOICES[name])}"
    return RANGES[name].wrong(name, value) if name in RANGES else None


# Where what TRL does with another number is nonsense or a late error
RANGES = setups.RANGES | {
    "max_steps": Range(lambda x: x == -1 or x >= 1, "at least 1, or -1 for num_train_epochs"),
    "seed": Range(lambda x: 0 <= x < 2**32, "from 0 to 4294967295"),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon"), NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), DROPOUT),
    **dict.fromkeys(("num_train_epochs", "repetition_penalty", "lora_alpha"), ABOVE_0),
    **dict.fromkeys(("lora_r", "max_prompt_tokens", "ref_model_sync_steps", "save_total_limit"), AT_LEAST_1),
    "dataloader_num_workers": Range(lambda x: x >= 0, "0 or more"),
}
# What clips, masks or waits: with inf, nothing is clipped or masked, and it waits for ever
UNLIMITED = {
    "max_grad_norm", "epsilon", "epsilon_high", "delta", "off_policy_mask_threshold", "entropy_coef_max",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "vllm_server_timeout", "eval_delay",
    "reward_clip_range",
}  # fmt: skip
# setting -> what it may be; TRL looks at loss_type only in the first update
CHOICES = {
    "algorithm": tuple(TRAINERS),
    "memory_snapshot": ("peak", "oom"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}
