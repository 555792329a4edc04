"""A folder with a tiny model that vLLM's CPU backend takes: heads of 64, random weights."""

from pathlib import Path

VOCABULARY = 1024


def save_qwen3(folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rloo_memory import data, models

    tokenizer = models.build_tokenizer([data.load_documents("builtin")[0][:20_000]], VOCABULARY)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
