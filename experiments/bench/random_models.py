"""The models of the bench: random weights in shapes that two cores can take."""

from experiments.bench.group import Image
from experiments.bench.samples import Cell
from rloo_memory.errors import ConfigError
from rloo_memory.models import shape_config

IMAGE = Image(side=64, token=3)
IMAGE_TOKENS = IMAGE.side**2 // 4
VOCABULARY = 32_000

MODELS = {  # -> built-in shape, vocabulary, layers
    "narrow": ("qwen3-8-layers", 32_768, 8),
    "bench": ("qwen3-8-layers", VOCABULARY, 8),  # that of the scale `bench`
    "wide": ("qwen3-0.6b", 10_852, 2),  # a fourteenth of the vocabulary
    "gated-deltanet": ("qwen3.5-8-layers", VOCABULARY, 8),
    "tiny": ("qwen3-8-layers", 512, 2),  # for a trial
}


def config_of(model: str):
    """The transformers config of one of `MODELS`."""
    from rloo_memory.plan.scale_up.extrapolate import with_layers  # loads torch

    shape, vocab_size, layers = MODELS[model]
    return with_layers(shape_config(shape, vocab_size), layers)


def build(cell: Cell):
    """(model, vocabulary, image or None). Raises `ConfigError` for a prompt that is too short for its image."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if cell.model == "images":
        if cell.prompt_tokens < IMAGE_TOKENS + 40:
            raise ConfigError(f"a prompt of {cell.prompt_tokens} is too short for images: {IMAGE_TOKENS + 40} or more")
        return build_with_images(), VOCABULARY, IMAGE
    return AutoModelForCausalLM.from_config(config_of(cell.model)), MODELS[cell.model][1], None


def build_with_images():
    """Qwen2.5-VL's architecture. As in its 3B, the tower has about three quarters of the text model's multiplications
    on a prompt with one image."""
    from transformers import AutoModelForImageTextToText

    config = shape_config("qwen2.5-vl-8-layers")
    config.text_config.vocab_size, width = VOCABULARY, config.text_config.hidden_size
    vision = dict(depth=2, fullatt_block_indexes=[1], hidden_size=width, intermediate_size=3 * width)
    config.vision_config.update(vision)
    special = dict(image_token_id=IMAGE.token, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    config.update(special)
    return AutoModelForImageTextToText.from_config(config)
