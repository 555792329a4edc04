"""What a run left behind, read for the doctor: its settings, model, measured peaks and device."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.models import is_model, typed_line
from rloo_memory.plan.setups import Setup

# Settings that decide a training, and that memory.json has of some trainers, or of the launcher alone
WANTED = ("algorithm", "dataset_name")


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
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no memory.json, which MemoryCallback writes; name another run, or describe it"
        )
    try:
        return memory_record(json.loads(path.read_text()))
    except Exception as error:  # a model's damaged config raises whatever its values lead to
        why = f"is not a whole record ({typed_line(error)})"
        raise ConfigError(f"{path} {why}; name another run, or describe it") from error


def config_from(values: dict):
    """The transformers config that `to_dict` gave."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def memory_record(record: dict) -> Run:
    """memory.json, which `rloo_memory.hooks.memory_callback.MemoryCallback` writes."""
    hf_config = config_from(record["model_config"])
    settings, where = record["settings"], record["devices"] | {"device": record["device_kind"]}
    numbers = [*record["peaks"].values(), *record["devices"].values(), *chain(*record.get("images", ()))]
    if wrong := [number for number in numbers if not isinstance(number, int)]:
        raise TypeError(f"{wrong[0]!r} is no whole number")
    Setup(0, **where)  # knows its own fields
    if reward := record["reward_model"]:
        where["reward_model"] = reward
        if is_model(reward):
            settings["reward_model_name_or_path"] = reward
    missing = [name for name in WANTED if name not in settings] + record["not_recorded"]
    if not {"reward_funcs", "reward_model_name_or_path"} & settings.keys():
        missing.append("reward_funcs")
    prompt = record["prompt_tokens"]
    if images := record.get("images"):
        where["images"] = tuple(map(tuple, images))
        if prompt is not None:  # those of the row with most of them, which the run may not have come to
            prompt = max(prompt, record["predicted_prompt_tokens"] or 0)
    return Run(settings, where, hf_config, prompt, record["peaks"], record["device_bytes"], tuple(missing))
