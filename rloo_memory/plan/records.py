"""What a run left behind, read for the doctor: its settings, model, measured peaks and device."""

import json
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.models import is_model, typed_line

# Settings that decide a training, and that memory.json may not have
WANTED = ("algorithm", "dataset_name", "learning_rate", "num_iterations", "seed")
WANTED_WITH_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")
NOT_SETTINGS = ("num_devices", "fully_sharded", "zero_stage", "offload_parameters", "offload_optimizer")


@dataclass(frozen=True)
class Run:
    """A finished or failed run. `settings` are those that it recorded, under TRL's names, `where` the fields of
    `rloo_memory.plan.setups.Setup` that are no settings, `missing` the settings that it did not record. Sizes in
    bytes."""

    settings: dict
    where: dict
    hf_config: object
    prompt_tokens: int | None  # None: another engine than transformers generated
    peaks: dict[str, int]
    device_bytes: int | None
    missing: tuple[str, ...] = ()


def read_run(folder: Path) -> Run:
    """Raises `ConfigError` where the folder has no record that can be read, or one of a trainer that the planner does
    not know."""
    path = folder / "memory.json"
    if path.exists():
        try:
            return memory_record(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"is not a whole record ({typed_line(error)})"
            raise ConfigError(f"{path} {why}; name another run, or describe it") from error
    raise ConfigError(f"{folder} holds no memory.json, which MemoryCallback writes; name another run, or describe it")


def config_from(values: dict):
    """The transformers config that `to_dict` gave."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[values["model_type"]](
        **{name: value for name, value in values.items() if name != "model_type"}
    )


def memory_record(record: dict) -> Run:
    """memory.json, which `rloo_memory.hooks.memory_callback.MemoryCallback` writes."""
    hf_config = config_from(record["model_config"])
    arguments = record["arguments"]
    where = {name: arguments[name] for name in NOT_SETTINGS if name in arguments} | {"device": record["device_kind"]}
    recorded = arguments | record.get("settings", {})
    settings = {name: value for name, value in recorded.items() if name not in NOT_SETTINGS and value is not None}
    for name in ("offload_reference", "offload_reward"):
        if not settings.get(name):
            settings.pop(name, None)
    settings["dtype"] = record["dtype"]
    if record["lora_rank"]:
        settings |= {"use_peft": True, "lora_r": record["lora_rank"]}
        if settings.get("prefix_sharing"):
            settings.setdefault("lora_dropout", 0.0)  # it would have been refused otherwise
        if "lora_target_modules" not in settings:
            where["lora_target_modules"] = "all-linear"
    if record["weight_bits"] < 16:
        settings[f"load_in_{record['weight_bits']}bit"] = True
    if reward := record.get("reward_model"):
        where["reward_model"] = reward
        if is_model(reward):
            settings["reward_model_name_or_path"] = reward
    wanted = WANTED + (WANTED_WITH_LORA if record["lora_rank"] else ())
    missing = tuple(name for name in wanted if name not in settings)
    if not {"reward_funcs", "reward_model_name_or_path"} & settings.keys():
        missing += ("reward_funcs",)
    if "num_iterations" in missing:  # nor are the others that decide whether a change trains the same
        where |= {"scaled_by_rollout": True, "scaled_by_batch": True}
    prompt = record["prompt_tokens"]
    if images := record.get("images"):  # older records have none
        where["images"] = tuple(map(tuple, images))
        if prompt is not None:  # those of the row with most of them, which the run may not have come to
            prompt = max(prompt, record["predicted_prompt_tokens"] or 0)
    return Run(settings, where, hf_config, prompt, record["peaks"], record["device_bytes"], missing)
