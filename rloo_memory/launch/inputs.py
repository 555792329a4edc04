"""What a launched training is given: the model and its tokenizer, the built-in prompts, the reward."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import shutil
import sys
import tempfile
from pathlib import Path

from rloo_memory.adapters import adapter_of
from rloo_memory.device import is_out_of_memory
from rloo_memory.errors import ConfigError
from rloo_memory.launch import prompt_images
from rloo_memory.launch.dataset import one_line
from rloo_memory.models import SHAPES, is_model, model_source
from rloo_memory.plan.checkpoint import settings_in
from rloo_memory.storage import user_folder

# What TRL calls a reward function with, besides the dataset's columns
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
LETTERS = "letters - counts the letter e, for trying things out"


def check_model(name: str | None) -> None:
    """Raise `ConfigError` where no model is named, or one that is not here. Loads nothing."""
    if not name:
        raise ConfigError("no model: set MODEL_PATH, or model_name_or_path in the profile")
    if name == "random:":
        raise ConfigError(f"model 'random:' names no shape; such as random:{' or random:'.join(SHAPES)}")
    if adapter := adapter_of(name):
        if not is_model(adapter.base):
            raise adapter.missing()
        return
    if is_model(name) or name.startswith("random:"):
        return
    hub = "" if name.startswith((".", "/", "~")) else f"MODEL_PATH=hub:{name} downloads it, "
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    raise ConfigError(
        f"model {name!r} is not a folder here; {hub}MODEL_PATH=random:{short} takes its shape with random weights"
    )


def model_and_tokenizer(name: str, with_images: bool = False):
    """(path of the model, tokenizer); for prompts `with_images`, the processor in place of the tokenizer, which is in
    it. Of an adapter's folder, those of its model. Raises `ConfigError`. Only hub: downloads."""
    from transformers import AutoConfig, AutoTokenizer

    if adapter := adapter_of(name):
        return model_and_tokenizer(adapter.base, with_images)
    path = random_model(name.removeprefix("random:")) if name.startswith("random:") else model_source(name)
    try:
        hf_config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except Exception as error:  # a broken file raises whatever its parser raises
        raise ConfigError(
            f"cannot load model {name!r}: {one_line(error)}; name a folder with one, or hub:..."
        ) from error
    if not tokenizer("Say a.")["input_ids"]:
        raise ConfigError(f"model {name!r} has no tokenizer; put the files of one beside its weights")
    return path, processor_of(name, path, hf_config) if with_images else tokenizer


def quantization_of(path: str, model):
    """How the weights in `path` are loaded: as the `trl.ModelConfig` asks, and unpacked where they are quantized by
    MXFP4, which cannot be trained. Raises `ConfigError` where weights that are quantized already are to be trained, or
    quantized again."""
    from transformers import AutoConfig

    from trl import get_quantization_config

    asked, settings = get_quantization_config(model), settings_in(AutoConfig.from_pretrained(path))
    if settings is None:
        return asked
    method = settings.get("quant_method", "bitsandbytes")
    if method == "mxfp4":
        from transformers import Mxfp4Config

        return Mxfp4Config(dequantize=True)
    if asked is not None and method != "bitsandbytes":
        raise ConfigError(
            f"the model's weights are already quantized ({method}): leave out load_in_4bit and load_in_8bit"
        )
    if not model.use_peft and method in ("bitsandbytes", "gptq", "awq"):
        raise ConfigError(
            f"the model's weights are already quantized ({method}), so they cannot be trained themselves; add "
            "--use_peft true"
        )
    return asked


def with_adapter(folder: str, path: str, config, quantization):
    """The model in `path` as TRL loads it, with the adapter in `folder`, which is trained further."""
    from peft import PeftModel
    from trl.trainer.utils import create_model_from_path

    asked = {"trust_remote_code": config.trust_remote_code, **config.model_init_kwargs}
    config.model_init_kwargs = None  # TRL loads nothing more: with adapters, it needs no second model
    if quantization is not None:
        asked["quantization_config"] = quantization
    return PeftModel.from_pretrained(create_model_from_path(path, **asked), folder, is_trainable=True)


def processor_of(name: str, path: str, hf_config):
    """What makes tokens and pixel values of chats with images. Raises `ConfigError` for a model that takes none."""
    from transformers import AutoProcessor

    takes_none = (
        f"the prompts have images, and model {name!r} (of type {hf_config.model_type}) takes none; name a multimodal "
        "one, or remove the column of images"
    )
    if hf_config.get_text_config() is hf_config:
        raise ConfigError(takes_none)
    try:
        processor = AutoProcessor.from_pretrained(path, padding_side="left")
    except Exception as error:  # without torchvision a class that is a stand-in, a list that names it, or none
        said, remedy = one_line(error), "put its preprocessor_config.json beside its weights"
        if any(package in str(error).lower() for package in ("torchvision", "pillow")):
            said, remedy = said.partition(". ")[0], prompt_images.install()  # the rest names web pages
        raise ConfigError(
            f"the prompts have images, and the processor of model {name!r} cannot be loaded: {said}; {remedy}"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(takes_none)
    return processor


def random_model(shape: str, cache: Path | None = None) -> str:
    """The folder of a model with random weights in bfloat16 and its tokenizer; written where it is not there yet.

    Its name says everything that decides what is in it, and it is renamed into place when it is whole: launches at the
    same time never write over one another, and the processes of one launch share it. Raises `ConfigError`.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from rloo_memory import data, models

    hf_config = models.named_config(shape)
    documents = data.load_documents("builtin")
    versions = (torch.__version__, transformers.__version__, hf_config.to_json_string())
    digest = hashlib.sha256("\0".join((*versions, *documents)).encode()).hexdigest()[:12]
    cache = cache or user_folder("XDG_CACHE_HOME", ".cache") / "models"
    folder = cache / f"random-{Path(shape).name.lower()}-{digest}"
    if folder.exists():
        return str(folder)
    tokenizer = models.build_tokenizer(documents, hf_config.vocab_size)
    hf_config.pad_token_id, hf_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=cache))
    try:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)
        staging.rename(folder)
    except Exception as error:  # a full disk has another type in each library
        if is_out_of_memory(error):
            raise
        if not folder.exists():  # another launch was not faster
            raise ConfigError(f"cannot write {folder}: {one_line(error)}; make room there") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return str(folder)


def builtin_prompts(tokenizer, tokens: int):
    """A training set of prompts of that many tokens from Python's documentation. Raises `ConfigError`."""
    from datasets import Dataset

    from rloo_memory import data

    return Dataset.from_dict({"prompt": data.build_prompts(data.load_documents("builtin"), tokenizer, tokens)})


def check_reward(name: str | None, dataset: str) -> None:
    """Raise `ConfigError` where a dataset comes without a reward, or with one that is not there. Imports nothing."""
    if name is None and dataset != "builtin":
        raise ConfigError(
            f"dataset {dataset!r} is given and no reward; --reward module:function (docs/launch.md says how to write "
            "one), a reward model's folder, or --reward letters to try things out"
        )
    if name in (None, "letters") or is_model(name):
        return
    folder, module, function = split_reward(name)
    file = module.rpartition(".")[2]
    if function and not file.isidentifier() and (folder / f"{file}.py").exists():
        raise ConfigError(
            f"reward {name!r}: Python cannot import {file}.py, whose name may have letters, digits and _ only; "
            "rename it to " + re.sub(r"\W", "_", file) + ".py"
        )
    if not function and (folder / f"{file}.py").exists():
        raise ConfigError(f"reward {name!r} names no function; write {name.removesuffix(':')}:FUNCTION")
    if not function or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"reward {name!r} is no folder here and not module:function; docs/launch.md says how to write one"
        )
    where = folder / module.split(".")[0]
    here = where.is_dir() or where.with_suffix(".py").exists()
    if not here and module.split(".")[0] not in sys.modules and importlib.util.find_spec(module.split(".")[0]) is None:
        raise ConfigError(
            f"reward {name!r}: there is no {module.split('.')[0]}.py in {folder} or on PYTHONPATH; put it there, "
            "or go to where it is"
        )


def split_reward(name: str) -> tuple[Path, str, str]:
    """(folder to import from, module, function) of module:function, rewards.py:function, /path/rewards.py:function."""
    module, _, function = name.partition(":")
    folder = Path.cwd()
    if module.startswith(("/", "~", "../")):
        folder, module = (folder / Path(module).expanduser().parent).resolve(), Path(module).name
    return folder, module.removesuffix(".py").removeprefix("./").replace("/", "."), function


def reward_function(name: str | None, columns: list[str]):
    """The function that `module:function` names, or where a reward model is.

    `columns` are those of the dataset: TRL calls the function with each of them. Raises `ConfigError` for one that
    cannot be imported or cannot be called so.
    """
    from rloo_memory.data import letter_reward

    taken = [column for column in columns if column in REWARD_ARGUMENTS]
    if taken and not is_model(name or ""):
        raise ConfigError(
            f"the dataset has the column {taken[0]!r}, and TRL gives the reward an argument of that name itself; "
            "rename the column"
        )
    if name in (None, "letters"):
        return letter_reward
    if is_model(name):
        return model_source(name)
    folder, module, function = split_reward(name)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module is the user's: its import may raise anything
        raise ConfigError(
            f"reward {name!r}: {type(error).__name__}: {one_line(error)}; `python -c 'import {module}'` shows where"
        ) from error
    if not callable(found) or inspect.isclass(found) or not hasattr(found, "__name__"):
        raise ConfigError(
            f"reward {name!r} is {one_line(repr(found))}; name a function, or a callable with a __name__"
        )
    given = dict.fromkeys(
        (*REWARD_ARGUMENTS, *(column for column in columns if column not in ("prompt", "completion")))
    )
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} cannot be called as TRL calls it: {error}; it gets {', '.join(given)}, each by name: "
            f"def {function}(completions, **kwargs) -> list[float]"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return checked(name, found)


def checked(name: str, function):
    """The reward function, which raises `ConfigError` for what it returns where TRL cannot train on it."""
    from trl.trainer.utils import is_async_callable

    calls = 0

    def check(rewards, completions):
        nonlocal calls
        calls += 1
        return check_rewards(name, rewards, len(completions), first=calls == 1)

    @functools.wraps(function)
    def call(**given):
        return check(function(**given), given["completions"])

    @functools.wraps(function)
    async def call_async(**given):
        return check(await function(**given), given["completions"])

    return call_async if is_async_callable(function) else call


def check_rewards(name: str, rewards, count: int, first: bool = False) -> list:
    """The rewards as a list. Raises `ConfigError` unless they are `count` finite numbers or None. A NaN is refused in
    the `first` call alone: later it leaves a completion out, as None does."""
    import torch

    expected = f"TRL expects a list of {count} finite numbers, one a completion, or None to leave one out"
    returned = f"the reward {name!r} returned {one_line(repr(rewards))}"
    try:
        rewards = list(rewards)
        numbers = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
    except Exception as error:  # what is no list, and what is no number: each raises its own
        raise ConfigError(f"{returned}; {expected}") from error
    if numbers.shape != (count,):
        raise ConfigError(f"{returned}, of shape {tuple(numbers.shape)}; {expected}")
    wrong = ~numbers.isfinite() if first else numbers.isinf()
    if wrong.any():
        raise ConfigError(f"{returned}: number {int(wrong.nonzero()[0]) + 1} is {numbers[wrong][0]}; {expected}")
    return rewards


def check_reward_reads(model: str) -> None:
    """Raise `ConfigError` for a reward model whose chat template does not take contents in parts: what prompts with
    images have, of which it is given the text."""
    from transformers import AutoTokenizer

    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
    try:
        text = AutoTokenizer.from_pretrained(model).apply_chat_template(chat, tokenize=False)
        if "'type'" in text:
            raise ValueError(f"it makes {text!r} of them")
    except Exception as error:  # a template is a program: it raises what it likes
        raise ConfigError(
            f"the prompts have images, and the chat template of the reward model {model!r} does not take them: "
            f"{one_line(error)}; use a reward function, or a model whose template takes contents in parts"
        ) from error


def reward_in_words(name: str | None, reward) -> str:
    """The reward for the summary at the start: its name, and where it comes from."""
    if isinstance(reward, str):
        return f"reward model {reward}"
    if name in (None, "letters"):
        return LETTERS
    file = getattr(sys.modules.get(reward.__module__), "__file__", None) or reward.__module__
    return f"{name} ({file})"
