"""Tiny random models of the families that the pinned transformers maps to a causal or an image-text class.

A family's own default config says which fields there are: `SIZES` shrinks those it knows by name, also in the configs
nested in it, and `MORE` holds what single families need besides. Nothing here knows prefix sharing.
"""

import re
from dataclasses import dataclass, field

VOCAB = 128
FIRST_TOKEN, LAST_TOKEN = 3, 95  # what a prompt may hold: between padding, end, begin and all other special tokens
LAYERS, LAYERS_MIXED, MOST_LAYERS = 3, 4, 6  # alike; of two kinds or more; of so many kinds
# Longer than the rows on which prefix sharing tries a model (8 tokens), as windows are in what people train, and
# shorter than the prompts of the check: what reaches past a window is seen here only
WINDOW = 10

NAMES_BY_SIZE = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length context_length",
    64: "mamba_d_ssm",
    56: "image_size",
    48: "intermediate_size moe_intermediate_size ffn_dim d_ff dff dim_ff n_inner mlp_dim ffn_hidden_size d_inner "
    "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size encoder_ffn_dim "
    "decoder_ffn_dim intermediate_size_mlp expert_ffn_hidden_size share_expert_dim shared_experts_intermediate_size "
    "dense_intermediate_size feed_forward_size moe_hidden_size projection_intermediate_size projection_hidden_dim "
    "alignment_intermediate_size merged_hidden_size router_hidden_size downsample_hidden_size",
    32: "hidden_size d_model n_embd embed_dim embedding_size emb_dim text_hidden_size out_hidden_size output_dim "
    "embedding_dim input_embedding_size output_embedding_size word_embed_proj_dim lru_width projector_hidden_size "
    "vision_output_dim projector_output_dim attention_hidden_size encoder_hidden_size backbone_hidden_size "
    "hidden_size_global projection_dim projection_hidden_size adapter_out_dim adapter_in_dim adapter_input_size "
    "base_channels",
    16: "qk_head_dim kv_lora_rank q_lora_rank o_lora_rank laurel_rank adapter_rank hc_lowrank gated_norm_rank "
    "time_step_rank mamba_dt_rank mamba_d_head mamba_headdim mamba_head_dim num_position_embeddings codebook_size "
    "num_embeddings",
    WINDOW: "sliding_window attention_window_size local_attention window_size sliding_window_size index_topk "
    "attention_chunk_size keep_window_size local_attention_window_len",
    8: "head_dim attention_head_dim swa_head_dim kv_channels d_kv qk_nope_head_dim dim_head d_head "
    "qk_rope_head_dim v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim "
    "attention_head_size rotary_dim resampler_head_dim hidden_size_per_layer_input d_rel ssm_state_size state_size "
    "mamba_d_state mamba_chunk_size chunk_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "swa_num_attention_heads num_sliding_attention_heads linear_num_heads linear_num_value_heads mamba_num_heads "
    "mamba_n_heads num_decoder_attention_heads num_encoder_attention_heads num_query_groups "
    "num_attention_heads_per_layer num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads linear_num_key_heads index_n_heads "
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts num_kv_shared_layers "
    "num_mem_blocks hidden_stride",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups n_shared_experts num_shared_experts "
    "moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index max_window_layers",
    0: "num_nextn_predict_layers",
}
SIZES = {name: size for size, names in NAMES_BY_SIZE.items() for name in names.split()}
DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_decoder_layers "
    "num_encoder_layers layers num_blocks conf_num_hidden_layers num_layers_per_stack"
).split()
# Fields that a default config may leave open, and a model does not
OPEN = (
    "head_dim num_key_value_heads n_routed_experts n_shared_experts num_experts_per_tok sliding_window "
    "num_local_experts num_experts moe_intermediate_size top_k_experts"
).split()
RANDOM = re.compile(r"drop(out|path)?(_|$)|pdrop|layerdrop|_dropout|jitter")  # set to 0: no two calls would be equal
TOKEN = re.compile(r"_token_(id|index)$|^(mask|unk)_index$|^im_(start|end|newline)_id$|^image_patch_id$")
PLAIN_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def rope(**more) -> dict:
    return {"rope_type": "default", "rope_theta": 10_000.0, **more}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
ROPE_IN_THREE = {"rope_parameters": rope(mrope_section=[2, 1, 1])}
MORE: dict[str, dict] = {  # {model type of a config: what else it needs; a nested config by its name}
    **dict.fromkeys(
        "qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text glm4v_text glm_ocr_text qwen2_5_omni_text cosmos3_edge_text "
        "hunyuan_vl_text".split(),
        ROPE_IN_THREE,
    ),
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "cohere_compass_text": {**SLIDING, "rope_parameters": {"sliding_attention": rope(), "full_attention": rope()}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots1": SLIDING,
    "emu3": {"vocabulary_map": {"<image>": 100}},
    "ernie4_5_vl_moe_text": {"rope_parameters": rope(mrope_section=[1, 1, 2])},
    "glm4v_moe_text": {"rope_parameters": rope(mrope_section=[1, 1, 0], partial_rotary_factor=0.5)},
    "glm5_next_text": {"index_kpool": 2},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "granitemoeshared": {"shared_intermediate_size": 48},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "granitemoe_swa": {"shared_intermediate_size": 48},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": SLIDING,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "mamba2": {"head_dim": 16},
    "mellum": {**SLIDING, "mlp_layer_types": ["sparse"] * 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 2]},
    "muse_spark_audio": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 110},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 110},
    "qwen3_vl_moe_text": {"sliding_window": None},  # its cache would slide, its attention does not
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local"] * 2,
        "local_attn_chunk_length": 7,
    },
    "smollm3": SLIDING,
    "step3p5": SLIDING,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Family:
    """A model class with the config it is made of, and the names under which transformers maps to it."""

    names: tuple[str, ...]
    class_name: str
    config_type: str  # model type of the config
    more: dict = field(default_factory=dict, hash=False)  # of the config, in place of what is here


def mappings() -> tuple[dict[str, str], dict[str, str]]:
    """Class names by model type: causal classes, and those that take images."""
    from transformers.models.auto import modeling_auto

    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def config_type_of(name: str, class_name: str) -> str:
    """A class that is made of the text part of a nested config gets that part."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[name]
    own = getattr(transformers, class_name).config_class
    return own.model_type if own in config_class.sub_configs.values() else config_class.model_type


def families() -> list[Family]:
    """All of both mappings. Names that lead to the same class and config are one family."""
    found: dict[tuple[str, str], list[str]] = {}
    for mapping in mappings():
        for name, class_name in mapping.items():
            names = found.setdefault((class_name, config_type_of(name, class_name)), [])
            if name not in names:
                names.append(name)
    return [Family(tuple(names), *key) for key, names in found.items()]


def family(name: str, **more) -> Family:
    """The family of that model type, with images if there is one, and with some fields of its config."""
    causal, with_images = mappings()
    class_name = with_images.get(name) or causal[name]
    return Family((name,), class_name, config_type_of(name, class_name), more)


def tiny_config(config_class, **more):
    """A config of `config_class` in which all known sizes are small."""
    more = {**MORE.get(config_class.model_type, {}), **more}
    values = vars(config_class())
    changed, next_token = {}, LAST_TOKEN + 1
    if "use_sliding_window" in values:
        changed["use_sliding_window"] = True
        values = vars(config_class(**changed))  # which layers slide follows from it
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            changed[name] = tiny_config(type(value), **more.pop(name, {}))
        elif RANDOM.search(name) and isinstance(value, float):
            changed[name] = 0.0
        elif name in PLAIN_TOKENS:
            changed[name] = PLAIN_TOKENS[name]
        elif TOKEN.search(name) and isinstance(value, int):
            changed[name] = next_token
            next_token += 1
        elif name not in SIZES or isinstance(value, bool):
            continue
        elif isinstance(value, int) and value > 0 or value is None and name in OPEN:
            changed[name] = SIZES[name]
        elif isinstance(value, list) and value and isinstance(value[0], int):  # one a layer
            changed[name] = [SIZES[name]] * len(value)
    if isinstance(values.get("kv_lora_rank"), int) and "num_key_value_heads" in values:  # latents serve all heads
        changed["num_key_value_heads"] = SIZES["num_attention_heads"]
    return config_class(**{**tiny_layers(values, changed), **more})


def tiny_layers(values: dict, changed: dict) -> dict:
    """`changed` with few layers, one of each kind: lists with an entry a layer keep what makes layers differ."""
    depths = {name: values[name] for name in DEPTHS if isinstance(values.get(name), int) and values[name] > 0}
    depth = values.get("num_hidden_layers") or max(depths.values(), default=0)
    now = {**values, **changed}
    per_layer = {
        name: value for name, value in now.items() if isinstance(value, list | tuple) and len(value) == depth > LAYERS
    }
    layers = list(zip(*(map(str, value) for value in per_layer.values()), strict=True))
    first_of_kind = [layers.index(kind) for kind in dict.fromkeys(layers)]
    count = LAYERS if len(first_of_kind) < 2 else min(max(LAYERS_MIXED, len(first_of_kind)), MOST_LAYERS)
    chosen = (first_of_kind * count)[:count]
    shortened = {name: [value[i] for i in chosen] for name, value in per_layer.items()}
    return {**changed, **shortened, **dict.fromkeys(depths, count)}


def build(family: Family):
    """The model in float32, with weights large enough that attention matters."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[family.config_type], **family.more)
    model = getattr(transformers, family.class_name)._from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # the decay of a state: at initialization, hardly anything of a prompt is left
            parameter.data.fill_(-2)
        elif name.endswith("conv1d.weight"):
            parameter.data.mul_(32)
        elif parameter.numel() > 1 and parameter.min() == parameter.max():  # zeros and ones leave parts out
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        elif parameter.dim() > 1:
            parameter.data.mul_(4)
    return model
