"""The models of the bench: random weights in shapes that two cores can take."""

from experiments.bench.group import Image
from experiments.bench.samples import Cell
from rloo_memory.errors import ConfigError
from rloo_memory.models import shape_config

IMAGE = Image(side=64, token=3)
IMAGE_TOKENS = IMAGE.side**2 // 4
HIDDEN, VOCABULARY = 256, 32_000  # of the model that sees images


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
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    vision = dict(
        depth=2, fullatt_block_indexes=[1], hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, out_hidden_size=HIDDEN,
        num_heads=4,
    )  # fmt: skip
    text = dict(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]),
    )  # fmt: skip
    special = dict(image_token_id=IMAGE.token, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision, **special)
    return AutoModelForImageTextToText.from_config(config)
