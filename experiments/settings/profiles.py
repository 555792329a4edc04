"""Training profiles: YAML files in `experiments/settings/profiles` that TRL's own scripts and parser read."""

import dataclasses
import difflib
from pathlib import Path

import yaml

from experiments.config import ARMS, ConfigError

FOLDER = Path(__file__).with_name("profiles")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def fields() -> set[str]:
    """Every field that TRL's RLOO and GRPO scripts accept, in the fork, and those of the launcher."""
    from experiments.builds import use_fork

    use_fork(ARMS["shared"])
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.rloo import RLOOScriptArguments

    from experiments.settings.arguments import LaunchArguments
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig

    classes = (
        RLOOConfig,
        GRPOConfig,
        ModelConfig,
        DatasetMixtureConfig,
        RLOOScriptArguments,
        GRPOScriptArguments,
        LaunchArguments,
    )
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


def profile_path(name: str) -> Path:
    return Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"


def load_profile(name: str) -> dict:
    """Settings of a profile in `FOLDER`, or of a YAML file. Raises `ConfigError` that names the line and the key."""
    path = profile_path(name)
    if not path.exists():
        near = difflib.get_close_matches(name, names(), n=1)
        raise ConfigError(
            f"unknown profile {name!r}{f' (did you mean {near[0]}?)' if near else ''}: choose one of "
            f"{', '.join(names())}, or a YAML file"
        )
    text = path.read_text()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: {error.problem}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected `name: value` lines")
    known = fields()
    seen = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(f"{path}, line {line}: {key.value!r} is set again (first on line {seen[key.value]})")
        seen[key.value] = line
        if key.value not in known:
            near = difflib.get_close_matches(key.value, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; TRL has no such setting"
            raise ConfigError(f"{path}, line {line}: unknown setting {key.value!r}{hint}")
    for one, other, reason in CONTRADICTIONS:
        if settings.get(one) and settings.get(other):
            raise ConfigError(f"{path}, line {seen[one]}: {one} contradicts {other} (line {seen[other]}): {reason}")
    for one, needed, reason in NEEDS:
        if settings.get(one) and not settings.get(needed):
            raise ConfigError(f"{path}, line {seen[one]}: {one} needs {needed}: {reason}")
    return settings


def devices_from(path: Path) -> dict:
    """Fields of `Setup` from an accelerate config. Raises `ConfigError` for what the planner has no formula for."""
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    kind, fsdp = config.get("distributed_type", "NO"), config.get("fsdp_config") or {}
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        raise ConfigError(f"{path}: no formula for distributed_type {kind}; DDP (MULTI_GPU) and FSDP are known")
    if kind == "FSDP" and (fsdp.get("fsdp_version", 1) != 2 or not fsdp.get("fsdp_reshard_after_forward", True)):
        raise ConfigError(f"{path}: the formula is for fsdp_version 2 with fsdp_reshard_after_forward: true")
    return {
        "num_devices": 1 if kind == "NO" else config.get("num_processes", 1),
        "fully_sharded": kind == "FSDP",
        "offload_parameters": bool(fsdp.get("fsdp_offload_params")),
    }


def dump_profile(path: Path, settings: dict, comments: list[str]) -> None:
    """Write a profile that `load_profile` and TRL's parser read."""
    text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(settings, sort_keys=False)
    path.write_text(text)


# (setting, other setting, why they cannot both be on)
CONTRADICTIONS = (
    ("load_in_4bit", "load_in_8bit", "a weight has one size; remove one of them"),
    ("prefix_sharing", "torch_compile", "the passes of a shared prompt change in shape; remove torch_compile"),
    ("use_vllm", "use_transformers_continuous_batching", "one engine generates; remove one of them"),
    ("completions_per_forward", "tokens_per_forward", "each says what goes through the model together; remove one"),
    ("bf16", "fp16", "one of them is the compute type; remove fp16"),
)
# (setting, setting that must be on as well, why)
NEEDS = (
    ("load_in_4bit", "use_peft", "quantized weights are frozen, adapters are trained"),
    ("load_in_8bit", "use_peft", "quantized weights are frozen, adapters are trained"),
    ("completions_per_forward", "prefix_sharing", "only prefix sharing divides a group into passes"),
    ("vllm_gpu_memory_utilization", "use_vllm", "it is vLLM's share of the device"),
    ("vllm_enable_sleep_mode", "use_vllm", "it is vLLM that sleeps"),
)
