"""Prompts with images and processors for them, made on the spot, without torchvision."""

from transformers import ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Attributes of the tokenizer, which the processors ask for, and their tokens
TOKENS = {
    "image_token": "<image>", "video_token": "<video>", "boi_token": "<boi>", "eoi_token": "<eoi>",
    "start": "<start>", "end": "<end>",
}  # fmt: skip
# What a config calls them
IN_CONFIG = {
    "image_token_id": "<image>", "video_token_id": "<video>", "vision_start_token_id": "<start>",
    "vision_end_token_id": "<end>", "boi_token_index": "<boi>", "eoi_token_index": "<eoi>",
}  # fmt: skip
SENTENCE = "What does the picture show, and where is each thing in it? "


class WithoutVideos(ProcessorMixin):
    """For processors of images and videos: without the part that needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = tokenizer.video_token, tokenizer.video_token_id
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class QwenProcessor(WithoutVideos, Qwen2_5_VLProcessor):
    pass


def with_image_tokens(tokenizer):
    """The tokenizer itself, with `TOKENS`."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    for name, token in TOKENS.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def with_token_ids(hf_config, tokenizer):
    """The config itself, with the tokenizer's vocabulary and ids of `TOKENS`."""
    hf_config.text_config.vocab_size = len(tokenizer)
    for name, token in IN_CONFIG.items():
        if hasattr(hf_config, name):
            setattr(hf_config, name, tokenizer.convert_tokens_to_ids(token))
    return hf_config


def processor_of(hf_config, tokenizer):
    """The processor of a Qwen-VL or Gemma 3 model."""
    vision = hf_config.vision_config
    if hf_config.model_type == "gemma3":
        images = Gemma3ImageProcessorPil(size=dict(height=vision.image_size, width=vision.image_size))
        template = TEMPLATE.replace("IMAGE", "<boi>")
        length = hf_config.mm_tokens_per_image
        return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=length)
    images = Qwen2VLImageProcessorPil(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size)
    return QwenProcessor(images, tokenizer, chat_template=TEMPLATE.replace("IMAGE", "<start><image><end>"))


def picture(width: int, height: int, seed: int):
    """A `PIL.Image.Image` of random pixels."""
    import torch
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def dataset_of(sizes: tuple[tuple[int, int], ...], sentences: int, rows: int = 4):
    """A training set: prompts of one text, each with images of its own of these widths and heights in pixels."""
    from datasets import Dataset

    seeds = iter(range(rows * len(sizes)))
    images = [[picture(*size, next(seeds)) for size in sizes] for _ in range(rows)]
    prompts = [[{"role": "user", "content": SENTENCE * sentences}] for _ in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "images": images})
