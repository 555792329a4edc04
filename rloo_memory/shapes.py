"""Shapes of models as published: the fields of their config.json that decide sizes.

tiny-qwen3 is trl-internal-testing's tiny-Qwen3ForCausalLM, those of 8 layers are ours, the others are from the models'
own config.json; a test holds their numbers of weights against the published ones.
"""


def _rope(theta: float, **more) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_QWEN3 = dict(
    model_type="qwen3", vocab_size=151_936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    **_rope(1e6),
)  # fmt: skip
_QWEN2 = dict(model_type="qwen2", vocab_size=152_064, max_position_embeddings=32_768, **_rope(1e6))
_LLAMA = dict(
    model_type="llama", vocab_size=128_256, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
_LLAMA_SMALL = _LLAMA | {"rope_parameters": _LLAMA["rope_parameters"] | {"factor": 32.0}}
_MISTRAL = dict(
    model_type="mistral", num_key_value_heads=8, head_dim=128, sliding_window=None, max_position_embeddings=32_768,
)  # fmt: skip
_8_LAYERS = dict(
    hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32_768, tie_word_embeddings=False,
)  # fmt: skip
# Of the tower of Gemma 3's larger models
_SIGLIP = dict(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=896,
    patch_size=14, vision_use_head=False,
)  # fmt: skip


def _shape(family: dict, hidden: int, intermediate: int, layers: int, heads: int, tied: bool, **more) -> dict:
    return {
        **family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **more,
    }


def _qwen3_5(hidden: int, intermediate: int, layers: int, heads: int, value_heads: int, tied: bool) -> dict:
    text = dict(
        vocab_size=248_320, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128,
        max_position_embeddings=262_144, tie_word_embeddings=tied,
    )  # fmt: skip
    vision = dict(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16, out_hidden_size=hidden,
        num_position_embeddings=2304,
    )  # fmt: skip
    return dict(model_type="qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=tied)


def _gemma3(hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, head_dim: int) -> dict:
    text = dict(
        vocab_size=262_208, max_position_embeddings=131_072, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head_dim,
        sliding_window=1024,
    )  # fmt: skip
    return dict(model_type="gemma3", text_config=text, vision_config=_SIGLIP)


SHAPES = {
    "tiny-qwen3": dict(
        model_type="qwen3", vocab_size=151_936, hidden_size=8, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=32_768,
        tie_word_embeddings=False,
    ),
    # Qwen3's proportions, small enough for two cores
    "qwen3-8-layers": dict(_8_LAYERS, model_type="qwen3", vocab_size=151_936, head_dim=64),
    # As narrow, with a state in three of four layers: Gated DeltaNet, Mamba-2, short convolutions
    "qwen3.5-8-layers": dict(
        _8_LAYERS, model_type="qwen3_5_text", vocab_size=248_320, head_dim=64, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "bamba-8-layers": dict(
        _8_LAYERS, model_type="bamba", vocab_size=128_000, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64,
        mamba_n_groups=1, attn_layer_indices=[3, 7],
    ),
    "lfm2-8-layers": dict(
        _8_LAYERS, model_type="lfm2", vocab_size=65_536, layer_types=[*["conv"] * 3, "full_attention"] * 2,
    ),
    # As narrow, with a tower for images
    "qwen2.5-vl-8-layers": dict(
        model_type="qwen2_5_vl",
        text_config=dict(_8_LAYERS, vocab_size=152_064, **_rope(1e6, mrope_section=[8, 12, 12])),
        vision_config=dict(
            depth=4, hidden_size=128, intermediate_size=344, num_heads=4, out_hidden_size=256, patch_size=14,
            window_size=112, fullatt_block_indexes=[1, 3],
        ),
    ),
    "qwen3-vl-8-layers": dict(
        model_type="qwen3_vl",
        text_config=dict(
            _8_LAYERS, vocab_size=151_936, head_dim=64, **_rope(5e6, mrope_section=[16, 8, 8], mrope_interleaved=True)
        ),
        vision_config=dict(
            depth=4, hidden_size=128, intermediate_size=512, num_heads=4, out_hidden_size=256, patch_size=16,
            num_position_embeddings=256, deepstack_visual_indexes=[0, 1, 2],
        ),
    ),
    "gemma-3-8-layers": dict(
        model_type="gemma3", mm_tokens_per_image=64,
        text_config=_8_LAYERS | dict(vocab_size=262_208, head_dim=64, sliding_window=128, tie_word_embeddings=True),
        vision_config=dict(
            hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, image_size=224,
            patch_size=14, vision_use_head=False,
        ),
    ),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _shape(_QWEN3, 4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _shape(_QWEN3, 5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _shape(_QWEN3, 5120, 25_600, 64, 64, tied=False),
    "qwen3-30b-a3b": _shape(
        _QWEN3, 2048, 6144, 48, 32, tied=False, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "qwen3-vl-8b": dict(
        model_type="qwen3_vl", tie_word_embeddings=False,
        text_config=_shape(
            _QWEN3, 4096, 12_288, 36, 32, tied=False, model_type="qwen3_vl_text", max_position_embeddings=262_144,
            **_rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True),
        ),
        vision_config=dict(
            depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16, out_hidden_size=4096,
            num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
        ),
    ),
    "qwen2.5-1.5b": _shape(_QWEN2, 1536, 8960, 28, 12, tied=True, num_key_value_heads=2, vocab_size=151_936),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 18_944, 28, 28, tied=False, num_key_value_heads=4),
    "qwen2.5-14b": _shape(_QWEN2, 5120, 13_824, 48, 40, tied=False, num_key_value_heads=8),
    "qwen2.5-vl-7b": dict(
        model_type="qwen2_5_vl", tie_word_embeddings=False,
        text_config=_shape(
            _QWEN2, 3584, 18_944, 28, 28, tied=False, model_type="qwen2_5_vl_text", num_key_value_heads=4,
            max_position_embeddings=128_000, **_rope(1e6, mrope_section=[16, 24, 24]),
        ),
        vision_config=dict(
            depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584, patch_size=14,
            window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
        ),
    ),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, 16, 32, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 12_288, 32, 16, 32, tied=False),
    "qwen3.5-27b": _qwen3_5(5120, 17_408, 64, 24, 48, tied=False),
    "llama-3.2-1b": _shape(_LLAMA_SMALL, 2048, 8192, 16, 32, tied=True, head_dim=64),
    "llama-3.2-3b": _shape(_LLAMA_SMALL, 3072, 8192, 28, 24, tied=True),
    "llama-3.1-8b": _shape(_LLAMA, 4096, 14_336, 32, 32, tied=False),
    "llama-3.3-70b": _shape(_LLAMA, 8192, 28_672, 80, 64, tied=False),
    "mistral-7b-v0.3": _shape(_MISTRAL, 4096, 14_336, 32, 32, tied=False, vocab_size=32_768, **_rope(1e6)),
    "mistral-small-24b-2501": _shape(_MISTRAL, 5120, 32_768, 40, 32, tied=False, vocab_size=131_072, **_rope(1e8)),
    "gemma-3-1b": dict(
        model_type="gemma3_text", vocab_size=262_144, max_position_embeddings=32_768, hidden_size=1152,
        intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        sliding_window=512,
    ),
    "gemma-3-4b": _gemma3(2560, 10_240, 34, 8, 4, 256),
    "gemma-3-12b": _gemma3(3840, 15_360, 48, 16, 8, 256),
    "gemma-3-27b": _gemma3(5376, 21_504, 62, 32, 16, 128),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", vocab_size=201_088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, max_position_embeddings=131_072, tie_word_embeddings=False,
    ),
    "phi-4": dict(
        model_type="phi3", vocab_size=100_352, hidden_size=5120, intermediate_size=17_920, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=10, max_position_embeddings=16_384, tie_word_embeddings=False,
        pad_token_id=100_349,
    ),
    "smollm3-3b": dict(
        model_type="smollm3", vocab_size=128_256, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=65_536, tie_word_embeddings=True,
    ),
}  # fmt: skip
