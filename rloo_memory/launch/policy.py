"""The model that a launched training is given, and its tokenizer or processor."""

import contextlib
import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_memory import data, models
from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.models import is_model, model_source, one_line
from rloo_memory.plan.checkpoint import settings_in
from rloo_memory.plan.options import quiet
from rloo_memory.storage import new_folder


@dataclass(frozen=True)
class Policy:
    """Where the model is, its config, and its tokenizer; for prompts with images the processor, which has one."""

    path: str
    hf_config: object
    tokenizer: object


def check(name: str | None, revision: str = "main") -> None:
    """Raise `ConfigError` where no model is named, one that is not here, or another revision of one that is. Loads
    nothing."""
    if not name:
        raise ConfigError("no model: set MODEL_PATH, or model_name_or_path in the profile")
    adapter = adapter_of(name)
    if revision != "main" and not (adapter.base if adapter else name).startswith("hub:"):
        raise ConfigError(f"model_revision {revision!r} is for models of the hub, and {name!r} is none; leave it out")
    if adapter:
        if not is_model(adapter.base):
            raise adapter.missing()
    elif not is_model(name) and not name.startswith("random:"):
        raise ConfigError(
            f"model {name!r} is not a folder here; name one, hub:owner/name (downloads it) or random:shape"
        )


def load(name: str, config, with_images: bool = False) -> Policy:
    """Of an adapter's folder, its model. Only hub: downloads; code beside a model runs with `trust_remote_code`."""
    from transformers import AutoTokenizer

    if adapter := adapter_of(name):
        return load(adapter.base, config, with_images)
    if name.startswith("random:"):
        name = random_model(name.removeprefix("random:"))
    path, asked = model_source(name), config.model_init_kwargs or {}
    changed = {key: value for key, value in asked.items() if "dtype" not in key}
    options = {"trust_remote_code": config.trust_remote_code, "revision": asked.get("revision", "main")}
    hf_config = models.load_config(name, **changed | options)
    with without_zero3(config.deepspeed_plugin):
        check_weights(name, Path(path), hf_config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **options)
    except Exception as error:
        raise ConfigError(f"cannot load the tokenizer of model {name!r}: {one_line(error)}") from error
    if not tokenizer("Say a.")["input_ids"]:
        raise ConfigError(f"model {name!r} has no tokenizer; put the files of one beside its weights")
    return Policy(path, hf_config, processor_of(name, path, hf_config, options) if with_images else tokenizer)


@contextlib.contextmanager
def without_zero3(plugin) -> Iterator[None]:
    """As long as transformers knows of ZeRO-3, it loads all models in shards, and none without values."""
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin:
            deepspeed.set_hf_deepspeed_config(plugin.dschf)


def class_of(hf_config) -> type | None:
    """The model's class, None where it is not one of transformers."""
    import transformers

    return getattr(transformers, (hf_config.architectures or ["none"])[0], None)


def check_weights(name: str, folder: Path, hf_config) -> None:
    """Raise `ConfigError` where the weights in a folder are not those of its config: what is missing would be random,
    and layers beyond the config's would be left out. Nothing is read but the names and sizes of safetensors."""
    import torch

    model_class = class_of(hf_config)
    if not model_class or settings_in(hf_config):  # a class of its own, or packed weights
        return
    if not (sizes := sizes_in(name, folder)):
        return
    with quiet():  # of its table
        model, found = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict={key: torch.empty(size, device="meta", dtype=torch.bfloat16) for key, size in sizes.items()},
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    kinds = {without_numbers(key) for key in model.state_dict()}
    more_layers = getattr(hf_config.get_text_config(), "num_nextn_predict_layers", None)  # which only inference uses
    left_out = [key for key in found["unexpected_keys"] if not more_layers and without_numbers(key) in kinds]
    wrong = [
        f"{len(keys)} {what}, such as {min(keys)}"
        for what, keys in (
            ("are not there", found["missing_keys"]),
            ("have another size", [key for key, *_ in found["mismatched_keys"]]),
            ("are of layers that it has not", left_out),
        )
        if keys
    ]
    if wrong:
        raise ConfigError(
            f"the weights of model {name!r} are not those of its config.json: {'; '.join(wrong)}; take the config "
            "that was saved with them"
        )


def check_modules(model, config, hf_config) -> None:
    """Raise `ConfigError` where the model has not the attention or the modules for adapters that are asked for. Loads
    no weights."""
    from peft import get_peft_model

    from trl import get_peft_config

    asked, adapts = model.attn_implementation, model.use_peft and not adapter_of(model.model_name_or_path)
    if not (asked or adapts) or not class_of(hf_config):
        return
    what = f"attn_implementation {asked!r}"
    try:
        with without_zero3(config.deepspeed_plugin):
            policy = models.meta_model(copy.deepcopy(hf_config), attn_implementation=asked)  # which is written into it
        what, names = "adapters", [name for name, _ in policy.named_modules()]
        if adapts:
            get_peft_model(policy, get_peft_config(model))
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error
    for saved in (model.lora_modules_to_save or ()) if adapts else ():  # PEFT leaves out what it does not find
        if not any(name.endswith(saved) for name in names):
            raise ConfigError(f"lora_modules_to_save {saved}: the model has no module of that name")


def sizes_in(name: str, folder: Path) -> dict[str, list[int]]:
    """The sizes of weights in a folder's safetensors; nothing where it has none. Raises `ConfigError`."""
    from safetensors import SafetensorError, safe_open

    file = index = folder / "model.safetensors.index.json"
    files, sizes = [folder / "model.safetensors"], {}
    try:
        if index.exists() and not files[0].exists():  # as transformers prefers them
            files = [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        for file in files if all(file.exists() for file in files) else []:
            with safe_open(file, framework="pt") as opened:
                sizes |= {key: opened.get_slice(key).get_shape() for key in opened.keys()}
    except (OSError, ValueError, LookupError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"cannot load model {name!r}: {file.name}: {one_line(error)}") from error
    return sizes


def without_numbers(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def quantization_of(hf_config, model):
    """How the weights are loaded: as the `trl.ModelConfig` asks, and unpacked where they are quantized by MXFP4, which
    cannot be trained. Raises `ConfigError` where these are to have 4 or 8 bits."""
    from transformers import Mxfp4Config

    from trl import get_quantization_config

    if (settings_in(hf_config) or {}).get("quant_method") == "mxfp4":
        if model.load_in_4bit or model.load_in_8bit:
            bits = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
            raise ConfigError(f"{bits} is on, and the model's MXFP4 weights are unpacked to 16 bits; --{bits} false")
        return Mxfp4Config(dequantize=True)
    return get_quantization_config(model)


def with_adapter(folder: str, path: str, config, quantization, dropout: float):
    """The model in `path` as TRL loads it, with the adapter in `folder`, which is trained further with `dropout`."""
    from peft import PeftConfig, PeftModel
    from trl.trainer.utils import create_model_from_path

    asked = {"trust_remote_code": config.trust_remote_code, **config.model_init_kwargs}
    config.model_init_kwargs = None  # TRL loads nothing more: with adapters, it needs no second model
    if quantization is not None:
        asked["quantization_config"] = quantization
    of_adapter = PeftConfig.from_pretrained(folder)
    of_adapter.lora_dropout = dropout
    model = create_model_from_path(path, **asked)
    return PeftModel.from_pretrained(model, folder, is_trainable=True, config=of_adapter)


def processor_of(name: str, path: str, hf_config, options: dict):
    """What makes tokens and pixel values of chats with images. Raises `ConfigError` for a model that takes none."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, padding_side="left", **options)
    except Exception as error:  # without torchvision a class that is a stand-in, a list that names it, or none
        said = one_line(error).partition(". ")[0]  # the rest names web pages
        raise ConfigError(
            f"the prompts have images, and the processor of model {name!r}: {said}; docs/launch.md#dataset"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"the prompts have images, and model {name!r} (of type {hf_config.model_type}) takes none; name a "
            "multimodal one, or remove the column of images"
        )
    return processor


def random_model(shape: str) -> str:
    """The folder of a model with random weights in bfloat16 and its tokenizer; written where it is not there yet,
    under a name that says everything that decides what is in it. Raises `ConfigError`."""
    import torch
    import transformers

    hf_config = models.named_config(shape)
    text = hf_config.get_text_config()  # of a multimodal model, the one inside
    documents = data.load_documents()
    versions = (torch.__version__, transformers.__version__, hf_config.to_json_string())
    digest = hashlib.sha256("\0".join((*versions, *documents)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rloo-memory" / "models" / f"random-{Path(shape).name.lower()}-{digest}"
    if folder.exists():
        return str(folder)
    tokenizer = models.build_tokenizer(documents, text.vocab_size)
    text.pad_token_id, text.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with new_folder(folder) as staging:
        torch.manual_seed(0)
        models.auto_class(hf_config).from_config(hf_config, dtype=torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return str(folder)
