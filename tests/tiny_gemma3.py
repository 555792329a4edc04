"""A folder with a tiny Gemma 3 that takes images: random weights, and a processor that loads without torchvision."""

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedTokenizerFast

from experiments.workload import pictures
from rloo_memory import models

IMAGE_TOKENS, SIDE = 4, 16  # of each image: its tokens, and the pixels of a side that its processor scales it to


def save(folder: Path, text: dict | None = None, tower: dict | None = None, tokens: tuple[str, ...] = ()) -> None:
    """`text` and `tower` are fields of the configs in place of those here, `tokens` more of the tokenizer."""
    images = {name: pictures.TOKENS[name] for name in ("image_token", "boi_token", "eoi_token")}
    plain = models.build_tokenizer(["What is in the picture? Say a word. user system assistant"] * 4, 300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        eos_token=plain.eos_token,
        padding_side="left",
        extra_special_tokens=images,
        chat_template=pictures.TEMPLATE.replace("IMAGE", images["boi_token"]),
    )
    tokenizer.add_tokens(list(tokens))
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, sliding_window=16, vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE,
        patch_size=4,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=sizes | (text or {}),
        vision_config=vision | (tower or {}),
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    pictures.processor_of(config, tokenizer).save_pretrained(folder)
