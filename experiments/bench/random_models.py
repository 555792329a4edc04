"""The models of the bench: random weights in shapes that two cores can take."""

from experiments.bench.group import Group, Image
from experiments.bench.samples import Cell
from rloo_memory.errors import ConfigError
from rloo_memory.models import shape_config
from rloo_memory.shapes import SHAPES

IMAGE = Image(side=64, token=3)
IMAGE_TOKENS = IMAGE.side**2 // 4
VOCABULARY = 32_000

MODELS = {  # -> built-in shape, vocabulary, layers
    "narrow": ("qwen3-8-layers", 32_768, 8),
    "bench": ("qwen3-8-layers", VOCABULARY, 8),  # that of the scale `bench`
    "wide": ("qwen3-0.6b", 10_852, 2),  # a fourteenth of the vocabulary
    "gated-deltanet": ("qwen3.5-8-layers", VOCABULARY, 8),
    "windows": ("gemma-3-1b", VOCABULARY, 8),  # seven of 512 tokens
    "sinks": ("gpt-oss-20b", VOCABULARY, 2),  # one with a window of 128; whole rows of 8 layers take five minutes
    "experts": ("qwen3-30b-a3b", VOCABULARY, 4),
    "tiny": ("qwen3-8-layers", 512, 2),  # for a trial
}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
NARROW = {name: SHAPES["qwen3-8-layers"][name] for name in SIZES}
CHANGED = {  # published shapes that are made as narrow as ours
    "windows": NARROW | dict(num_key_value_heads=1),
    "sinks": NARROW | dict(intermediate_size=256, num_local_experts=8),
    "experts": NARROW | dict(moe_intermediate_size=96, num_experts=32),
}


def config_of(model: str):
    """The transformers config of one of `MODELS`."""
    from rloo_memory.plan.scale_up.extrapolate import with_layers  # loads torch

    shape, vocab_size, layers = MODELS[model]
    config = shape_config(shape, vocab_size)
    config.update(CHANGED.get(model, {}))
    return with_layers(config, layers)


def group(cell: Cell, kind: type[Group] = Group, **more) -> Group:
    """One prompt and its completions, with the model. Raises `ConfigError` for a prompt that is too short for its
    image."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if cell.model == "images":
        if cell.prompt_tokens < IMAGE_TOKENS + 40:
            raise ConfigError(f"a prompt of {cell.prompt_tokens} is too short for images: {IMAGE_TOKENS + 40} or more")
        return kind(build_with_images(), VOCABULARY, cell, IMAGE, **more)
    model = AutoModelForCausalLM.from_config(config_of(cell.model))
    if cell.model == "experts":
        model = with_adapters(model)
    return kind(model, MODELS[cell.model][1], cell, **more)


def with_adapters(model):
    """The model with LoRA of rank 8 on its attention and on each expert: these alone are trained, and none is 0."""
    from peft import LoraConfig, inject_adapter_in_model

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=experts)
    lora.init_lora_weights = False
    model = inject_adapter_in_model(lora, model)
    model.enable_input_require_grads()  # as TRL does, for gradient checkpointing
    return model


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
