"""Training profiles: YAML files in `rloo_memory/settings/profiles`, of TRL's settings and the launcher's."""

import difflib
import re
from pathlib import Path

import yaml

from rloo_memory.errors import ConfigError
from rloo_memory.installed_trl import need_trl
from rloo_memory.models import one_line

FOLDER = Path(__file__).with_name("profiles")
IN_QUOTES = {"true": True, "false": False, "1": 1, "2": 2, "3": 3}  # accelerate hands all values on as text


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


class Loader(yaml.SafeLoader):
    """Refuses what YAML 1.1 reads as something else than is written."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]} is in it {names.count(twice[0])} times; leave one")
        return super().construct_mapping(node, deep)

    def number(self, node):
        value = (self.construct_yaml_int if node.tag.endswith("int") else self.construct_yaml_float)(node)
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
            raise ConfigError(f"{node.value} is {value} in YAML; write that, or quotes around a text")
        return value


for kind, read in {"int": Loader.number, "float": Loader.number, "timestamp": Loader.construct_yaml_str}.items():
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", read)


def read_yaml(path: Path) -> dict:
    """The `name: value` lines of a YAML file. Raises `ConfigError`."""
    try:
        values = yaml.load(path.read_text("utf-8-sig"), Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}; it must be YAML, in UTF-8") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `name: value` lines")
    return {str(name): value for name, value in values.items()}


def load_profile(name: str) -> dict:
    """The settings of a profile in `FOLDER`, or of a YAML file. Raises `ConfigError`."""
    settings = read_yaml(find_profile(name))
    need_trl()
    from rloo_memory.settings.trl_parser import typed

    try:
        return typed(settings)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def find_profile(name: str) -> Path:
    """Where the profile is. Raises `ConfigError` with the nearest name."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.exists():
        return path
    if path == Path(name):
        raise ConfigError(f"profile {name!r} is not here ({path.absolute()}); give the path of your YAML file")
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(f"unknown profile {name!r}{hint}: choose one of {', '.join(names())}, or a YAML file")


def devices_from(path: Path, autocast: bool = True) -> dict:
    """Fields of `Setup` from an accelerate config, a file or the name of one in `settings/accelerate`. Without
    `autocast`, where the settings ask for no mixed precision, the file decides. Raises `ConfigError` for what the
    planner has no formula for."""
    if not path.exists() and (FOLDER.with_name("accelerate") / path.name).exists():
        path = FOLDER.with_name("accelerate") / path.name
    config = read_yaml(path)
    for name in [name for name, values in config.items() if name.endswith("_config") and values]:
        if not isinstance(config[name], dict):
            raise ConfigError(f"{path}: {name} is {config[name]!r}: it must be `name: value` lines")
        config[name] = {key: IN_QUOTES.get(str(value).lower(), value) for key, value in config[name].items()}
    kind, processes = config.get("distributed_type") or "NO", config.get("num_processes", 1)  # YAML reads NO as false
    fsdp, precision = config.get("fsdp_config") or {}, str(config.get("mixed_precision") or "no").lower()
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"):
        raise ConfigError(f"{path}: no formula for distributed_type {kind!r}; MULTI_GPU, FSDP and DEEPSPEED are known")
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError(f"{path}: num_processes is {processes!r}: it must be a whole number from 1")
    known = fsdp.get("fsdp_version", 1) == 2 and fsdp.get("fsdp_reshard_after_forward", True) is True
    if kind == "FSDP" and not known:
        raise ConfigError(f"{path}: the formula is for fsdp_version: 2 with fsdp_reshard_after_forward: true")
    if other := without_formula(config, processes, kind == "FSDP", autocast or precision != "fp8"):
        raise ConfigError(f"{path}: no formula for {other}")
    devices, offload = 1 if kind == "NO" else processes, fsdp.get("fsdp_offload_params") is True
    found = {"num_devices": devices, "fully_sharded": kind == "FSDP", "offload_parameters": offload}
    if kind == "MULTI_CPU" or config.get("use_cpu") is True:
        found["device"] = "cpu"
    if not autocast and precision in ("bf16", "fp16"):
        found[precision] = True
    return found | (zero_from(path, config.get("deepspeed_config") or {}) if kind == "DEEPSPEED" else {})


def without_formula(config: dict, processes: int, fully_sharded: bool, known_precision: bool) -> str | None:
    """What else of an accelerate config changes memory, with what to do in its place."""
    for name, size in (config.get("parallelism_config") or {}).items():
        all_shard = name.endswith("dp_shard_size") and fully_sharded and size == processes
        if name.endswith("_size") and size not in (None, 1) and not all_shard:
            instead = "DDP, FSDP2 over all processes, and DeepSpeed are known: leave parallelism_config out"
            return f"{name}: {size}, of processes that do not each train rows of their own; {instead}"
    fsdp, dynamo = config.get("fsdp_config") or {}, config.get("dynamo_config") or {}
    backend = str(dynamo.get("dynamo_backend") or dynamo.get("backend") or "no")  # YAML reads NO as false
    wrap = str(fsdp.get("fsdp_auto_wrap_policy") or "TRANSFORMER_BASED_WRAP")
    reasons = {
        f"dynamo_backend {backend}: compiled layers keep other tensors; leave dynamo_config out":
            backend.lower() not in ("no", "false"),
        f"fsdp_auto_wrap_policy {wrap}; TRANSFORMER_BASED_WRAP gathers layer by layer":
            fully_sharded and wrap.upper() != "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing; set gradient_checkpointing in its place":
            fully_sharded and fsdp.get("fsdp_activation_checkpointing") is True,
        "mixed_precision fp8; set bf16: true": not known_precision,
    }  # fmt: skip
    return next((reason for reason, applies in reasons.items() if applies), None)


def zero_from(path: Path, deepspeed: dict) -> dict:
    """The same of accelerate's own settings of DeepSpeed: with a file of DeepSpeed's, its buckets may be others."""
    stage, words = deepspeed.get("zero_stage"), {"none": False, "cpu": True}
    places = [deepspeed.get(f"offload_{what}_device") or "none" for what in ("param", "optimizer")]
    if stage not in (2, 3) or not set(places) <= set(words):
        what = f"zero_stage 2 or 3 with offload devices none or cpu, not for {stage} with {', '.join(places)}"
        raise ConfigError(f"{path}: the formula is for deepspeed_config with {what}")
    of_parameters, of_optimizer = (words[place] for place in places)
    return {"zero_stage": stage, "offload_parameters": stage == 3 and of_parameters, "offload_optimizer": of_optimizer}


def dump_profile(path: Path, settings: dict, comments: list[str]) -> None:
    """Write a profile that `load_profile` reads. Raises `ConfigError` where it cannot be written."""
    text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(settings, sort_keys=False)
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error
