"""What a launched training is given: the model and its tokenizer, the prompts, the reward."""

import importlib
import os
import sys
from pathlib import Path

from experiments.config import ConfigError
from experiments.settings.arguments import LaunchArguments
from experiments.workload.models import is_model, model_source


def model_and_tokenizer(name: str | None, folder: Path, first: bool = True):
    """(path of the model, tokenizer). Raises `ConfigError`. Only hub: downloads. Of several processes, only the first
    one writes random weights to `folder`."""
    from transformers import AutoTokenizer

    if not name:
        raise ConfigError("no model: set MODEL_PATH, or model_name_or_path in the profile")
    if is_model(name):
        path = model_source(name)
        return path, AutoTokenizer.from_pretrained(path, padding_side="left")
    if not name.startswith("random:"):
        short = name.rsplit("/", 1)[-1].lower()
        raise ConfigError(
            f"model {name!r} is not a folder here; MODEL_PATH=hub:{name} downloads it, MODEL_PATH=random:{short} "
            "takes its shape with random weights"
        )
    if not first:
        return str(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    import torch
    from transformers import AutoModelForCausalLM

    from experiments.workload import data, models

    hf_config = models.named_config(name.removeprefix("random:"))
    tokenizer = models.build_tokenizer(data.load_documents("builtin"), hf_config.vocab_size)
    hf_config.pad_token_id, hf_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


def prompts(launch: LaunchArguments, tokenizer):
    """The training set, with a column `prompt`. Raises `ConfigError`."""
    from datasets import Dataset, load_dataset

    from experiments.workload import data

    source = launch.dataset
    if source == "builtin":
        return Dataset.from_dict(
            {"prompt": data.build_prompts(data.load_documents("builtin"), tokenizer, launch.prompt_tokens)}
        )
    if source.startswith("hub:"):
        dataset = load_dataset(source.removeprefix("hub:"), split="train")
    elif Path(source).exists():
        kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(source).suffix)
        dataset = load_dataset(kind, data_files=source, split="train") if kind else load_dataset(source, split="train")
    else:
        raise ConfigError(f"dataset {source!r} is not here; name a file, a folder, or hub:{source} to download it")
    if "prompt" not in dataset.column_names:
        raise ConfigError(f"dataset {source!r} has no column 'prompt'; it has {', '.join(dataset.column_names)}")
    return dataset


def reward_function(name: str):
    """The function that `module:function` names, or where a reward model is. Raises `ConfigError`."""
    from experiments.workload.data import letter_reward

    if name == "letters":
        return letter_reward
    if is_model(name):
        return model_source(name)
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: {error}; write it as module:function, or name a folder") from error
