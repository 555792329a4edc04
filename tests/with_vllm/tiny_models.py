"""Folders with tiny models that vLLM's CPU backend takes: heads of 64, random weights."""

from pathlib import Path

import tiny_gemma3
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rloo_memory import data, models

VOCABULARY = 1024


def save_text(folder: Path, kind: str = "qwen3", **more) -> Path:
    """A text model of that type of transformers, `more` fields of its config beside those of all."""
    tokenizer = models.build_tokenizer([data.load_documents()[0][:20_000]], VOCABULARY)
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**shape | more)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_gemma3(folder: Path) -> Path:
    """One that takes images."""
    text = dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        query_pre_attn_scalar=64, initializer_range=0.1, vocab_size=4096,  # few samples are the token of images
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    tower = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2)
    # vLLM's Gemma 3 looks for these in the vocabulary
    tiny_gemma3.save(folder, text, tower, tokens=tuple("\n" * n for n in (1, 2, 3, 4)))
    return folder
