"""Folders that hold a LoRA adapter, such as the launcher's own output: of which model it is, and how it is trained."""

import json
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError


@dataclass(frozen=True)
class Adapter:
    """An adapter in `folder` on the model `base`, a folder or a name; `settings` describe it under TRL's names."""

    folder: str
    base: str
    settings: dict

    def settings_over(self, asked: dict) -> dict:
        """Its settings in place of those that are asked for. Dropout is no weight: it stays as these have it."""
        dropout = asked.get("lora_dropout") if asked.get("use_peft") else None
        return self.settings | ({} if dropout is None else {"lora_dropout": dropout})

    def missing(self) -> ConfigError:
        """What to raise where the model is not found."""
        file = Path(self.folder, "adapter_config.json")
        return ConfigError(
            f"{self.folder!r} is an adapter of the model {self.base!r}, which is not a folder here; write its folder, "
            f"or hub:owner/name, which downloads it, as base_model_name_or_path into {file}"
        )


def lora_settings(config: dict) -> dict:
    """What the fields of a `peft.LoraConfig` say, under TRL's names."""
    targets = config["target_modules"]
    return {
        "use_peft": True,
        "lora_r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": config["lora_dropout"],
        "lora_target_modules": sorted(targets) if isinstance(targets, set | list) else targets,
    }


def adapter_of(model: str | None) -> Adapter | None:
    """The adapter in a local folder; None where `model` is something else. Raises `ConfigError` for one that cannot be
    read, or is not LoRA."""
    path = Path(model or "", "adapter_config.json")
    if not model or not path.is_file() or Path(model, "config.json").exists():
        return None
    try:
        config = json.loads(path.read_text())
        kind, base, settings = config["peft_type"], config["base_model_name_or_path"], lora_settings(config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot read {path} ({why}); it must be what PEFT wrote for LoRA") from error
    if kind != "LORA" or not isinstance(base, str):
        raise ConfigError(f"{path}: an adapter of kind {kind} on {base!r}; only LoRA on a named model can go on here")
    beside = Path(model, base)
    base = str(beside) if not Path(base).is_dir() and beside.is_dir() else base
    return Adapter(model, base, settings)
