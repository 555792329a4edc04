"""Configs of the models that trainings are tried with: the class of each, and what differs from `SHAPE`."""

from transformers import CONFIG_MAPPING

VOCAB = 97  # of the models; the batch leaves out what means images to some of them
FIRST_SPECIAL = 88
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip
# The window of 6 is shorter than the prompts, so that completions reach past its start
WINDOW = dict(sliding_window=6)
LAYER_EMBEDDINGS = dict(
    vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, num_hidden_layers=5, num_kv_shared_layers=2,
    layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")], **WINDOW,
)  # fmt: skip
# Queries are scaled by their position
SCALED = dict(
    rope_type="yarn", rope_theta=1e4, factor=32.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0,
    llama_4_scaling_beta=0.5,
)  # fmt: skip
MIXED = ["linear_attention", "full_attention", "linear_attention"]
DELTA = dict(
    layer_types=MIXED, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6
)
AXES = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4)
PIXTRAL = dict(VISION, image_size=16)
SIGLIP = dict(PIXTRAL, model_type="siglip_vision_model")
QWEN_VISION = dict(depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=32, num_heads=2, patch_size=4)


def nested(text_type, vision, **extra):
    """Settings of a multimodal class: those of the text part are the ones that the text config knows."""
    text = {name: value for name, value in extra.items() if hasattr(CONFIG_MAPPING[text_type], name)}
    names = (
        "image_token_id image_token_index boi_token_index eoi_token_index vision_start_token_id vision_end_token_id"
    )
    special = {name: FIRST_SPECIAL + i for i, name in enumerate([*names.split(), "video_token_id"])}
    others = {name: value for name, value in extra.items() if name not in text}
    return dict(text_config={**SHAPE, **text, "model_type": text_type}, vision_config=vision, **{**special, **others})


ARCHITECTURES = {
    # Multimodal classes, whose text model is nested
    "gemma3-nested": ("gemma3", nested("gemma3_text", SIGLIP, mm_tokens_per_image=4, **WINDOW)),
    "gemma4-nested": ("gemma4", nested("gemma4_text", VISION, audio_config=None, video_token_id=95, audio_token_id=96,
                                       **LAYER_EMBEDDINGS)),
    "mistral3-nested": ("mistral3", nested("ministral3", dict(PIXTRAL, model_type="pixtral"),
                                           rope_parameters=SCALED)),
    "qwen2.5-vl-nested": ("qwen2_5_vl", nested("qwen2_5_vl_text", dict(QWEN_VISION, window_size=16),
                                               rope_parameters=AXES)),
    "qwen3-vl-nested": ("qwen3_vl", nested("qwen3_vl_text", dict(QWEN_VISION, num_position_embeddings=16,
                                                                 deepstack_visual_indexes=[0]), rope_parameters=AXES)),
    # A nested class and a hybrid
    "qwen3.5-nested": ("qwen3_5", nested("qwen3_5_text", dict(QWEN_VISION, num_position_embeddings=16),
                                         rope_parameters=AXES, **DELTA)),
    "internvl-nested": ("internvl", nested("qwen2", dict(PIXTRAL, model_type="internvl_vision", image_size=[16, 16],
                                                         patch_size=[4, 4]))),
    "llava-nested": ("llava", nested("llama", dict(PIXTRAL, model_type="clip_vision_model"))),
    "smolvlm-nested": ("smolvlm", nested("llama", PIXTRAL, scale_factor=2)),
}  # fmt: skip
# Recurrent or convolutional states
CONV = dict(layer_types=["conv", "full_attention", "conv"])
# Chunks of 8 tokens: the prompts end within one
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8)
ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=24, experts_implementation="eager")
LATENTS = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
STATES = {
    "qwen3-next": ("qwen3_next", dict(DELTA, num_experts=4, shared_expert_intermediate_size=24, **ROUTED)),
    "qwen3.5-moe": ("qwen3_5_moe_text", dict(DELTA, num_experts=4, shared_expert_intermediate_size=24, **ROUTED)),
    "olmo-hybrid": ("olmo_hybrid", DELTA),
    "kimi-linear": ("kimi_linear", dict(layer_types=MIXED, linear_head_dim=8, linear_num_heads=4, num_local_experts=4,
                                        **LATENTS, **ROUTED)),
    "bamba": ("bamba", dict(MAMBA2, attn_layer_indices=[1])),
    "falcon-h1": ("falcon_h1", dict(MAMBA2, mamba_d_ssm=64)),  # every layer attends and has a state
    "lfm2": ("lfm2", dict(CONV, block_auto_adjust_ff_dim=False)),
}  # fmt: skip
