"""What settings may be, in a file and on a command line: their names, types, ranges, and which go together."""

import dataclasses
import difflib
import enum
import math
import reprlib
import types
import typing

from rloo_memory.errors import ConfigError
from rloo_memory.settings.arguments import LaunchArguments

MOST_SHOWN = 8  # mistakes of a file


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings by name, of the file that the user calls `source` and of a command line. `lines` are those of the file,
    of the settings that it decides."""

    source: str
    values: dict
    lines: dict[str, int]

    def under(self, words: dict) -> "Settings":
        """The same with the settings of a command line, which replace the file's."""
        lines = {name: line for name, line in self.lines.items() if name not in words}
        return Settings(self.source, {**self.values, **words}, lines)

    def refuse(self, problems: list[tuple[str, str]]) -> None:
        """Raise `ConfigError` with the (setting, what is wrong), if there are any: those of the command line, and
        those of the file with their lines."""
        said = [problem for name, problem in problems if name not in self.lines]
        in_file = sorted((self.lines[name], problem) for name, problem in problems if name in self.lines)
        if in_file:
            shown = "; ".join(f"line {line}: {problem}" for line, problem in in_file[:MOST_SHOWN])
            more = f"; and {len(in_file) - MOST_SHOWN} more" if len(in_file) > MOST_SHOWN else ""
            said.append(f"{self.source}, {shown}{more}")
        if said:
            raise ConfigError("; ".join(said))


def trainer_classes(algorithm: str) -> tuple:
    """The dataclasses of a training's settings: of "rloo" or "grpo", and of its model."""
    from rloo_memory.fork import need_fork

    need_fork()
    from trl import GRPOConfig, ModelConfig, RLOOConfig

    return (RLOOConfig if algorithm == "rloo" else GRPOConfig), ModelConfig


def fields() -> dict[str, tuple]:
    """Every field that TRL's RLOO and GRPO scripts accept, in the fork, and those of the launcher: its types."""
    classes = (*trainer_classes("rloo"), *trainer_classes("grpo"))
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.rloo import RLOOScriptArguments

    from trl import DatasetMixtureConfig

    # Truth is taken here, too, though the types do not say so
    found: dict[str, tuple] = {"resume_from_checkpoint": (bool,), "scale_rewards": (bool,), "fsdp": (bool,)}
    for cls in (*classes, DatasetMixtureConfig, RLOOScriptArguments, GRPOScriptArguments, LaunchArguments):
        for name, kinds in types_of(cls).items():
            found[name] = tuple(dict.fromkeys(found.get(name, ()) + kinds))
    return found


def types_of(cls) -> dict[str, tuple]:
    """The types that each field of a dataclass may have."""
    hints = typing.get_type_hints(cls)
    return {field.name: members(hints[field.name]) for field in dataclasses.fields(cls) if field.init}


def members(hint) -> tuple:
    """The types that a union allows, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def made(cls, values: dict):
    """A dataclass of settings, of the values that are its fields'."""
    kinds = types_of(cls)
    return cls(**{name: listed(value, kinds[name]) for name, value in values.items() if name in kinds})


def listed(value, kinds: tuple):
    """One word for a setting that is a list is a list of it."""
    is_list = any(typing.get_origin(kind) is list for kind in kinds) and str not in kinds
    return [value] if is_list and isinstance(value, str) else value


def checked(settings: Settings, known: dict[str, tuple]) -> tuple[dict, list[tuple[str, str]]]:
    """(the values that can be used, each of a type of `known`; what is wrong with the others)."""
    values, problems = {}, []
    for name, value in settings.values.items():
        if name not in known or name in REPLACED:
            near = difflib.get_close_matches(name, known, n=1)
            hint = REPLACED.get(name) or (f"did you mean {near[0]}?" if near else "TRL has none of that name")
            problems.append((name, f"unknown setting {name!r}; {hint}"))
        elif not any(fits(value, kind) for kind in known[name]):
            wanted = dict.fromkeys(words for kind in known[name] if (words := in_words(kind)))
            problems.append((name, f"{name} is {reprlib.repr(value)}: it must be {' or '.join(wanted)}"))
        elif problem := out_of_range(name, meant := as_meant(value, known[name])):
            problems.append((name, problem))
        else:
            values[name] = meant
    return values, problems


def at_odds(values: dict, lines: dict[str, int]) -> list[tuple[str, str]]:
    """(setting, what is wrong) where a value contradicts another's, or needs another. `lines` are those of a file."""
    found = []
    for one, other, reason in CONTRADICTIONS:
        if values.get(one) and values.get(other):
            where = f" (line {lines[other]})" if other in lines else ""
            found.append((one, f"{one} contradicts {other}{where}: {reason}"))
    for one, needed, reason in NEEDS:
        switched_off = one in lines and needed in values and needed not in lines  # by the command line, in a file
        if values.get(one) and not values.get(needed) and not switched_off:
            found.append((one, f"{one} needs {needed}: {reason}"))
    return found


def fits(value, kind) -> bool:
    """Whether a value is of a setting's type. Text may stand for a number, as on a command line, and for a list of
    one: YAML, too, reads 1e-6, which has no point, as text."""
    origin = typing.get_origin(kind) or kind
    if origin in (int, float, bool) and isinstance(value, str):
        try:
            value = {"true": True, "false": False}[value.lower()] if origin is bool else origin(value)
        except (KeyError, ValueError):
            return False
    if origin is bool:
        return isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    if origin is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) < 2**63 and math.isfinite(value)
    if origin is str or isinstance(origin, type) and issubclass(origin, enum.Enum):
        return isinstance(value, str)
    if origin is types.NoneType:
        return value is None
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin is dict:
        return isinstance(value, dict)
    if origin in (list, tuple):
        element = (typing.get_args(kind) or (typing.Any,))[0]
        several = [value] if isinstance(value, str) else value
        return isinstance(several, list) and all(fits(one, element) for one in several)
    return True  # a type of TRL's or of transformers' own, which they check


def as_meant(value, kinds: tuple):
    """A value that fits: text for a setting that takes no text is the number, the truth or the numbers it says."""
    elements = next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is list), ())
    if isinstance(value, str) and elements and str not in (*elements, *kinds):
        value = [value]
    if isinstance(value, list) and elements:
        return [as_meant(one, elements) for one in value]
    if not isinstance(value, str) or any(kind not in (bool, int, float) and fits(value, kind) for kind in kinds):
        return value
    kind = next(kind for kind in kinds if fits(value, kind))
    return value.lower() == "true" if kind is bool else kind(value)


def in_words(kind) -> str:
    origin = typing.get_origin(kind) or kind
    plain = {bool: "true or false", int: "a whole number", float: "a finite number", dict: "a mapping", list: "a list"}
    if origin is str or isinstance(origin, type) and issubclass(origin, enum.Enum):
        return "text (in quotes where YAML reads something else)"
    return {**plain, tuple: "a list", types.NoneType: "null"}.get(origin, "")


def out_of_range(name: str, value) -> str | None:
    """What is wrong with a number, by `RANGES`, or with a word, by `CHOICES`."""
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"{name} is {value!r}: choose one of {', '.join(CHOICES[name])}"
    if name not in RANGES or value is None:
        return None
    inside, words = RANGES[name]
    return None if inside(value) else f"{name} is {reprlib.repr(value)}: it must be {words}"


# Settings of other days -> what to write
REPLACED = {
    "completions_per_forward": "write tokens_per_forward: N * (max_completion_length + 1) for passes of N",
    "dataset": "write dataset_name",
    "reward": "write reward_funcs, or for a model's folder reward_model_name_or_path",
}
AT_LEAST_1 = (lambda x: x >= 1, "at least 1")
# setting -> (test, the same in words), where what TRL does with another number is nonsense or a late error
RANGES = {
    "per_device_train_batch_size": AT_LEAST_1,
    "gradient_accumulation_steps": AT_LEAST_1,
    "steps_per_generation": AT_LEAST_1,
    "num_iterations": AT_LEAST_1,
    "max_completion_length": AT_LEAST_1,
    "tokens_per_forward": AT_LEAST_1,
    "prompt_tokens": AT_LEAST_1,
    "max_prompt_tokens": AT_LEAST_1,
    "lora_r": AT_LEAST_1,
    "num_generations": (
        lambda x: 2 <= x <= 4096,
        "at least 2, as the baseline is made of the other completions, and at most 4096",
    ),
    "max_steps": (lambda x: x == -1 or x >= 1, "at least 1, or -1 for num_train_epochs"),
    "num_train_epochs": (lambda x: x > 0, "above 0"),
    "temperature": (lambda x: x > 0, "above 0"),
    "learning_rate": (lambda x: x >= 0, "0 or more"),
    "beta": (lambda x: x >= 0, "0 or more"),
    "lora_dropout": (lambda x: 0 <= x < 1, "from 0 to below 1"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1"),
    "top_k": (lambda x: x >= -1, "1 or more, or 0 for all tokens"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0; 1 has no effect"),
    "num_return_sequences": (lambda x: x == 1, "1: num_generations says how many completions a prompt has"),
    "vllm_gpu_memory_utilization": (lambda x: 0 < x <= 1, "above 0, at most 1"),
    "seed": (lambda x: 0 <= x < 2**32, "from 0 to 4294967295"),
}
# setting -> what it may be; TRL looks at loss_type only in the first update
CHOICES = {
    "algorithm": ("rloo", "grpo"),
    "memory_snapshot": ("peak", "oom"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}
# (setting, other setting, why they cannot both be on)
CONTRADICTIONS = (
    ("load_in_4bit", "load_in_8bit", "a weight has one size; remove one of them"),
    ("prefix_sharing", "torch_compile", "the passes of a shared prompt change in shape; remove torch_compile"),
    ("use_vllm", "use_transformers_continuous_batching", "one engine generates; remove one of them"),
    ("bf16", "fp16", "one of them is the compute type; remove fp16"),
)
# (setting, setting that must be on as well, why)
NEEDS = (
    ("load_in_4bit", "use_peft", "quantized weights are frozen, adapters are trained"),
    ("load_in_8bit", "use_peft", "quantized weights are frozen, adapters are trained"),
    ("vllm_gpu_memory_utilization", "use_vllm", "it is vLLM's share of the device"),
    ("vllm_enable_sleep_mode", "use_vllm", "it is vLLM that sleeps"),
)
