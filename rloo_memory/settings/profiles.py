"""Training profiles: YAML files in `rloo_memory/settings/profiles` that TRL's own scripts and parser read."""

import dataclasses
import difflib
import enum
import math
import reprlib
import types
import typing
from pathlib import Path

import yaml

from rloo_memory.errors import ConfigError

FOLDER = Path(__file__).with_name("profiles")
LARGEST_FILE = 2**20  # bytes; a profile has some dozen lines


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def profile_path(name: str) -> Path:
    return Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"


def fields() -> dict[str, tuple]:
    """Every field that TRL's RLOO and GRPO scripts accept, in the fork, and those of the launcher: its types."""
    from rloo_memory.fork import need_fork

    need_fork()
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.rloo import RLOOScriptArguments

    from rloo_memory.settings.arguments import LaunchArguments
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig

    # Truth is taken here, too, though the types do not say so
    found: dict[str, tuple] = {"resume_from_checkpoint": (bool,), "scale_rewards": (bool,), "fsdp": (bool,)}
    for cls in (
        RLOOConfig,
        GRPOConfig,
        ModelConfig,
        DatasetMixtureConfig,
        RLOOScriptArguments,
        GRPOScriptArguments,
        LaunchArguments,
    ):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found[field.name] = found.get(field.name, ()) + members(hints[field.name])
    return {name: tuple(dict.fromkeys(kinds)) for name, kinds in found.items()}


def members(hint) -> tuple:
    """The types that a union allows, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def read_yaml(path: Path) -> tuple[dict, dict[str, int]]:
    """(value of each name, its line) of a YAML file. Raises `ConfigError` that names the file and the line."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a YAML file")
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is not a file of at most {LARGEST_FILE // 2**10} KiB; name a YAML file")
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: {error.object[error.start]:#x} is not UTF-8; save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        refuse_shared_collections(path, text)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}, line {line}: {error.character:#04x} is no character of YAML; remove it") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: {error.problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; a profile has `name: value` lines") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected `name: value` lines")
    values, lines = {}, {}
    for key, node in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {line}: expected a name before the colon")
        if key.value in lines:
            raise ConfigError(f"{path}, line {line}: {key.value!r} is set again (first on line {lines[key.value]})")
        try:
            values[key.value] = loader.construct_object(node, deep=True)
        except Exception as error:  # a date that is none, an unknown tag: each type of YAML raises its own
            reason = getattr(error, "problem", None) or error
            raise ConfigError(
                f"{path}, line {line}: cannot read the value of {key.value!r} ({reason}); write it plainly"
            ) from error
        lines[key.value] = line
    return values, lines


def refuse_shared_collections(path: Path, text: str) -> None:
    """An alias of a list or mapping can hold itself, or grow without end: nothing in a profile needs one."""
    collections = set()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            collections.add(event.anchor)
        elif isinstance(event, yaml.AliasEvent) and event.anchor in collections:
            line = event.start_mark.line + 1
            raise ConfigError(f"{path}, line {line}: *{event.anchor} is an alias of a list or mapping; write it out")


def load_profile(name: str) -> dict:
    """Settings of a profile in `FOLDER`, or of a YAML file. Raises `ConfigError` that names the lines to change."""
    path = find_profile(name)
    settings, lines = read_yaml(path)
    known = fields()
    problems = []
    for key, value in settings.items():
        if key not in known or key in REPLACED:
            near = difflib.get_close_matches(key, known, n=1)
            hint = REPLACED.get(key) or (f"did you mean {near[0]!r}?" if near else "TRL has no such setting")
            problems.append((lines[key], f"unknown setting {key!r}; {hint}"))
        elif not any(fits(value, kind) for kind in known[key]):
            wanted = dict.fromkeys(words for kind in known[key] if (words := in_words(kind)))
            problems.append((lines[key], f"{key} is {reprlib.repr(value)}: it must be {' or '.join(wanted)}"))
        elif problem := out_of_range(key, value):
            problems.append((lines[key], problem))
        else:
            settings[key] = as_meant(value, known[key])
    problems += [(lines[one], problem) for one, problem in at_odds(settings, settings, lines)]
    if problems:
        shown = "; ".join(f"line {line}: {problem}" for line, problem in sorted(problems)[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"{path}, {shown}{more}")
    return settings


def at_odds(given, values: dict, lines: dict | None = None) -> list[tuple[str, str]]:
    """(setting, what is wrong) for each of the `given` settings whose value contradicts another's, or that needs
    another. `lines` are those of a file."""
    where = {name: f" (line {line})" for name, line in (lines or {}).items()}
    found = [
        (one, f"{one} contradicts {other}{where.get(other, '')}: {reason}")
        for one, other, reason in CONTRADICTIONS
        if {one, other} & set(given) and values.get(one) and values.get(other)
    ]
    return found + [
        (one, f"{one} needs {needed}: {reason}")
        for one, needed, reason in NEEDS
        if one in given and values.get(one) and not values.get(needed)
    ]


def find_profile(name: str) -> Path:
    """Where the profile is. Raises `ConfigError` with the nearest name."""
    path = profile_path(name)
    if not path.exists() and name.endswith((".yaml", ".yml")):
        raise ConfigError(f"profile {name!r} is not here ({path.absolute()}); give the path of your YAML file")
    if not path.exists():
        near = difflib.get_close_matches(name, names(), n=1)
        raise ConfigError(
            f"unknown profile {name!r}{f' (did you mean {near[0]}?)' if near else ''}: choose one of "
            f"{', '.join(names())}, or a YAML file"
        )
    return path


def fits(value, kind) -> bool:
    """Whether a YAML value is of a setting's type. Text may stand for a number, as on a command line: YAML reads 1e-6,
    which has no point, as text."""
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
        return (
            isinstance(value, list) and all(fits(one, element) for one in value) or element is str and fits(value, str)
        )
    return True  # a type of TRL's or of transformers' own, which they check


def as_meant(value, kinds: tuple):
    """A value that fits: text for a setting that takes no text is the number or the truth that it says."""
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
    """What is wrong with a number, given as one or as text, by `RANGES`, or with a word by `CHOICES`."""
    if value is not None and value not in CHOICES.get(name, (value,)):
        return f"{name} is {value!r}: choose one of {', '.join(CHOICES[name])}"
    if name not in RANGES or value is None:
        return None
    inside, words = RANGES[name]
    return None if inside(float(value)) else f"{name} is {reprlib.repr(value)}: it must be {words}"


def devices_from(path: Path) -> dict:
    """Fields of `Setup` from an accelerate config. Raises `ConfigError` for what the planner has no formula for."""
    config, _ = read_yaml(path)
    kind, fsdp = config.get("distributed_type", "NO"), config.get("fsdp_config")
    kind = "NO" if kind is False else kind  # YAML reads NO without quotes as false
    fsdp = {} if fsdp is None else fsdp
    processes = config.get("num_processes", 1)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        raise ConfigError(f"{path}: no formula for distributed_type {kind!r}; DDP (MULTI_GPU) and FSDP are known")
    if not fits(processes, int) or int(processes) < 1:
        raise ConfigError(f"{path}: num_processes is {reprlib.repr(processes)}: it must be a whole number from 1")
    if not isinstance(fsdp, dict):
        raise ConfigError(f"{path}: fsdp_config is {reprlib.repr(fsdp)}: it must be a mapping of `name: value` lines")
    if kind == "FSDP" and (
        fsdp.get("fsdp_version", 1) != 2 or fsdp.get("fsdp_reshard_after_forward", True) is not True
    ):
        raise ConfigError(f"{path}: the formula is for fsdp_version: 2 with fsdp_reshard_after_forward: true")
    offload = fsdp.get("fsdp_offload_params", False)
    if not isinstance(offload, bool):
        raise ConfigError(f"{path}: fsdp_offload_params is {reprlib.repr(offload)}: it must be true or false")
    return {
        "num_devices": 1 if kind == "NO" else int(processes),
        "fully_sharded": kind == "FSDP",
        "offload_parameters": offload,
    }


def dump_profile(path: Path, settings: dict, comments: list[str]) -> None:
    """Write a profile that `load_profile` and TRL's parser read. Raises `ConfigError` where it cannot be written."""
    text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(settings, sort_keys=False)
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error


# Settings of other days -> what to write
REPLACED = {"completions_per_forward": "write tokens_per_forward: N * (max_completion_length + 1) for passes of N"}
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
# setting -> what it may be, where TRL looks at it only in the first update
CHOICES = {"loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")}
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
