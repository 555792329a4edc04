"""Training profiles: YAML files in `rloo_memory/settings/profiles` that TRL's own scripts and parser read."""

import difflib
import reprlib
from pathlib import Path

import yaml

from rloo_memory.errors import ConfigError
from rloo_memory.settings.grammar import Settings, at_odds, checked, fields, fits

FOLDER = Path(__file__).with_name("profiles")
LARGEST_FILE = 2**20  # bytes; a profile has some dozen lines


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def profile_path(name: str) -> Path:
    return Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"


def read_yaml(path: Path) -> tuple[dict, dict[str, int]]:
    """(value of each name, its line) of a YAML file. Raises `ConfigError` that names the file and the line."""
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


def read_profile(name: str) -> Settings:
    """What a profile in `FOLDER`, or a YAML file, says. Raises `ConfigError`."""
    return Settings(name, *read_yaml(find_profile(name)))


def load_profile(name: str) -> dict:
    """The settings of a profile, for TRL's scripts or the launcher. Raises `ConfigError` that names the lines to
    change."""
    settings = read_profile(name)
    values, problems = checked(settings, fields())
    settings.refuse(problems + at_odds(values, settings.lines))
    return values


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
