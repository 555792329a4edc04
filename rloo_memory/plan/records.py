"""What a run left behind, read for the doctor: its settings, model, measured peaks and device."""

import json
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.arms import ARMS
from rloo_memory.errors import ConfigError
from rloo_memory.models import is_model, named_config, shape_config, typed_line
from rloo_memory.run_record import stored_run

# Settings that decide a training, and that memory.json may not have
WANTED = ("algorithm", "dataset_name", "learning_rate", "num_iterations", "seed")
WANTED_WITH_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")
NOT_SETTINGS = ("num_devices", "fully_sharded", "offload_parameters")


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
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"is not a whole record ({typed_line(error)})"
            raise ConfigError(f"{path} {why}; name another run, or describe it") from error
    if run := stored_run(folder):
        if run.damage:
            raise ConfigError(f"{folder / 'run.json'} {run.damage}; name another run, or describe it")
        return harness_record(folder, run.record)
    raise ConfigError(f"{folder} holds neither memory.json (MemoryCallback) nor run.json (experiments.train)")


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
    recorded = arguments | record.get("settings", {})  # older records have the first ones alone
    settings = {name: value for name, value in recorded.items() if name not in NOT_SETTINGS and value is not None}
    for name in ("offload_reference", "offload_reward"):
        if not settings.get(name):
            settings.pop(name, None)
    if completions := settings.pop("completions_per_forward", None):  # in older records
        settings["tokens_per_forward"] = completions * (settings["max_completion_length"] + 1)
    if dataset := settings.pop("dataset", None):  # likewise
        settings["dataset_name"] = dataset
    if (reward := settings.pop("reward", None)) and not is_model(reward):
        settings["reward_funcs"] = [reward]
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


def harness_record(folder: Path, record: dict) -> Run:
    """run.json, which `experiments.train` writes, also as runs.jsonl keeps it."""
    arm, config = ARMS[record["arm"]], record["config"]
    if arm.line != "current":
        raise ConfigError(f"{folder} is a run of {arm.name}: the planner knows today's trainer only; use --arm stock")
    rows = record["batch"] if arm.in_passes else record["completions_per_forward"]
    settings = {
        "dtype": "float32" if config["precision"] == "bf16" else config["precision"],
        "bf16": config["precision"] in ("bf16", "bfloat16"),
        "learning_rate": config["learning_rate"],
        "seed": config["seed"],
        "num_generations": record["k"],
        "num_iterations": config["epochs"],
        "per_device_train_batch_size": rows,
        "steps_per_generation": record["batch"] // rows,
        "gradient_accumulation_steps": record["batch"] // rows,
        "max_completion_length": record["completion_tokens"],
        "temperature": config["temperature"],
    }
    if arm.shares_prefix:
        settings["prefix_sharing"] = True
    if arm.in_passes:
        settings["tokens_per_forward"] = record["completions_per_forward"] * (record["completion_tokens"] + 1)
    if rank := config.get("lora_rank", 0):
        settings |= {"use_peft": True, "lora_r": rank, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    where = {
        "device": record["device_kind"],
        "padded": False,
        "reward_model": "policy" if config["reward"] == "model" else None,
    }
    model, shape = config["model"], config["shape"]
    hf_config = named_config(model) if model else shape_config(shape, config["vocab_size"])
    peaks = {record["peak_phase"]: record["peak_allocated_bytes"]} if record["peak_allocated_bytes"] else {}
    prompt = record["prompt_tokens_requested"]
    return Run(settings, where, hf_config, prompt, peaks, record["budget_bytes"], ("dataset_name", "reward_funcs"))
