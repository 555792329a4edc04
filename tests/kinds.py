"""Tiny models of every kind of attention and of state: model types, and what is special about some."""

import copy

from experiments.checks.tiny_families import Family, family

# Rows are longer than what the short factors are for, prompts and some completions behind them are not
LONGROPE = {"original_max_position_embeddings": 72, "rope_parameters": {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}}  # fmt: skip
# Queries are scaled by their position
SCALED = {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
}}  # fmt: skip
ATTENTION = {
    **{name: {} for name in (
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo2",
        "olmo3", "gpt_neox", "gpt2", "granite", "cohere", "cohere2", "gpt_oss", "deepseek_v3", "smollm3",
        "starcoder2", "gemma4_text", "gemma3n_text", "gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
        "qwen3_5", "internvl", "llava", "smolvlm", "glm4v",
    )},
    "phi3 longrope": LONGROPE,
    "ministral3": SCALED,
}  # fmt: skip
STATES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bamba", "granitemoehybrid",
    "nemotron_h", "falcon_h1", "lfm2", "lfm2_moe", "lfm3",
)  # fmt: skip


def kind(name: str) -> Family:
    return family(name.split()[0], **copy.deepcopy(ATTENTION.get(name, {})))
