"""A folder with a tiny Gemma 3 that takes images: random weights, and a processor that loads without torchvision."""

from pathlib import Path

from experiments.workload import models

IMAGE_TOKENS, SIDE = 4, 16  # of each image: its tokens, and the pixels of a side that its processor scales it to
# `<boi>` stands for an image, until the processor puts its tokens there
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<boi>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}


def save(folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    plain = models.build_tokenizer(["What is in the picture? Say a word. user system assistant"] * 4, 300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        eos_token=plain.eos_token,
        padding_side="left",
        extra_special_tokens=TOKENS,
        chat_template=TEMPLATE,
    )
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, sliding_window=16, vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tower = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE,
        patch_size=4,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=sizes,
        vision_config=tower,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size=dict(height=SIDE, width=SIDE))
    Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=IMAGE_TOKENS).save_pretrained(folder)
