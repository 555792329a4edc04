"""Models and tokenizer. By default built on the spot: published shapes, random weights, a tokenizer trained on the
documents themselves. Nothing is downloaded unless a `hub:` name asks for it."""

import difflib
import re
import sys
from importlib.metadata import version
from pathlib import Path

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError, choose
from rloo_memory.shapes import SHAPES

SPECIAL_TOKENS = ["[PAD]", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_TOKENIZER_VOCAB = 16_000  # enough for 465,000 characters; the model's vocabulary may be larger
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def shape_config(shape: str, vocab_size: int | None = None):
    """The transformers configuration of a built-in shape. Raises `ConfigError` for an unknown one."""
    from transformers import CONFIG_MAPPING

    fields = dict(SHAPES[choose("shape", shape, SHAPES)])
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def named_config(model: str):
    """The configuration of a built-in shape, also by its name on the hub, a local folder, or `hub:owner/name`; of an
    adapter's folder, that of its model. Where the hub does not answer, a shape of that name stands in, which is said.

    Raises `ConfigError` for anything else: nothing is downloaded unless `hub:` asks for it.
    """
    if adapter := adapter_of(model):
        try:
            return named_config(adapter.base)
        except ConfigError as error:
            raise adapter.missing() from error
    short = model.rsplit("/", 1)[-1].lower().removesuffix("-base").removesuffix("-it").replace("-instruct", "")
    if model.startswith("hub:") or Path(model).exists():
        try:
            return load_config(model)
        except ConfigError as error:
            if short not in SHAPES or not model.startswith("hub:") or not isinstance(error.__cause__, OSError):
                raise
            print(f"{error}; the built-in shape {short} stands in for it", file=sys.stderr)
    if short in SHAPES:
        return shape_config(short)
    near = difflib.get_close_matches(short, SHAPES, n=1)
    raise ConfigError(
        f"unknown model {model!r}{f' (did you mean {near[0]}?)' if near else ''}: name a built-in shape "
        f"({', '.join(SHAPES)}), a local folder, or hub:{model} to download its config"
    )


def load_config(model: str, **options):
    """The configuration in a local folder or, with `hub:`, on the hub; `options` are for `from_pretrained`. Raises
    `ConfigError`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_source(model), **{"trust_remote_code": False, **options})
    except Exception as error:  # a damaged config.json raises whatever its fields lead to
        if "custom code" in str(error):
            what = "it has code of its own; a training with --trust_remote_code true runs it"
        elif kind := re.search(r"model type `(.*?)` but", str(error)):
            what = f"its model type {kind[1]!r} is none that transformers {version('transformers')} knows"
            what += "; install a newer one if the type is right"
        else:
            remedy = "check its name and the network" if model.startswith("hub:") else "mend its config.json"
            what = f"{one_line(error)}; {remedy}"
        raise ConfigError(f"cannot load model {model!r}: {what}") from error


def one_line(error) -> str:
    """An error's or a value's text in one line of at most 300 characters; of an error that is one word, its type."""
    text = " ".join(str(error).split())
    if isinstance(error, Exception) and " " not in text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else text[:297] + "..."


def typed_line(error: Exception) -> str:
    """An error's text in one line, behind its type."""
    name, line = type(error).__name__, one_line(error)
    return line if line.startswith(f"{name}: ") else f"{name}: {line}"


def is_model(name: str) -> bool:
    """Whether a name says where a model is: a local folder, or `hub:owner/name`."""
    return name.startswith("hub:") or name != "" and Path(name).is_dir()


def model_source(model: str) -> str:
    return model.removeprefix("hub:")


def auto_class(hf_config):
    """The auto class of the model that TRL trains: a multimodal one where the text config is nested in another."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if hf_config.get_text_config() is hf_config else AutoModelForImageTextToText


def meta_model(hf_config, **options):
    """The language model of a configuration on the meta device: shapes, no memory. `options` are for `from_config`."""
    import torch
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = auto_class(hf_config).from_config(hf_config, **options)
        model.tie_weights()  # left out with the initialization
    return model


def build_tokenizer(documents: list[str], vocab_size: int):
    """A byte-level BPE tokenizer trained on `documents`: decoding and encoding again gives the same ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, MAX_TOKENIZER_VOCAB),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
