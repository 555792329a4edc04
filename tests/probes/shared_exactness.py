"""Per-token log-probabilities, entropies and gradients in passes against those of whole sequences in one.

Both run in one process on one model: without `passes` the fork computes what upstream does (test_prefix_sharing
shows it bit for bit). For each architecture it prints the relative errors in each of the settings below: prompts
shared or not, passes of some completions or tokens, checkpointing on or off. In bfloat16 the truth is the same rounded
weights in float64, and stock's own error stands beside.
"""

import contextlib
import copy
import json
import sys

import current_fork  # noqa: F401
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from trl.models.prefix_sharing import SharedPrefixPasses
from trl.models.prefix_sharing_enabling import enable_prefix_sharing
from trl.models.token_budget import TokenBudgetPasses
from trl.trainer import utils

from experiments.checks.float64 import pure_float64

VOCAB = 97  # of the models; the batch leaves out what means images to some of them
FIRST_SPECIAL = 88
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip
# The window of 6 is shorter than the prompts, so that completions reach past its start
WINDOW = dict(sliding_window=6)
MOE = dict(num_experts_per_tok=2)
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
    "llama": ("llama", {}),
    "mistral-window": ("mistral", WINDOW),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, max_window_layers=1, **WINDOW)),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", dict(num_experts=4, moe_intermediate_size=24, **MOE)),
    "mixtral": ("mixtral", dict(num_local_experts=4, **MOE)),
    "gemma2-window-softcap": ("gemma2", WINDOW),
    "gemma3-window": ("gemma3_text", WINDOW),
    "phi3": ("phi3", {}),
    # Rows are longer than what the short factors are for, prompts and some completions behind them are not
    "phi3-longrope": ("phi3", dict(original_max_position_embeddings=12, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 2.0, 3.0, 4.0]))),
    "olmo2": ("olmo2", {}),
    "olmo3-window": ("olmo3", WINDOW),
    "gpt-neox": ("gpt_neox", {}),
    "gpt2-learned-positions": ("gpt2", dict(n_embd=32, n_layer=3, n_head=4, n_positions=256, attn_pdrop=0.0,
                                            resid_pdrop=0.0, embd_pdrop=0.0)),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "cohere2-window": ("cohere2", WINDOW),
    "gpt-oss-sinks": ("gpt_oss", dict(num_local_experts=4, **MOE, **WINDOW)),
    # Latent attention caches other states than it attends to
    "deepseek-latents": ("deepseek_v3", dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, v_head_dim=12,
                                             qk_rope_head_dim=8, qk_nope_head_dim=8, first_k_dense_replace=3)),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", dict(embedding_dropout=0.0, residual_dropout=0.0)),
    # An embedding for each layer, and layers that attend to an earlier layer's keys and values
    "gemma4-layer-embeddings": ("gemma4_text", LAYER_EMBEDDINGS),
    "gemma3n-layer-embeddings": ("gemma3n_text", dict(LAYER_EMBEDDINGS, altup_num_inputs=2, laurel_rank=4,
                                                      activation_sparsity_pattern=[0.0] * 5)),
    # Multimodal classes, whose text model is nested
    "gemma3-nested": ("gemma3", nested("gemma3_text", SIGLIP, mm_tokens_per_image=4, **WINDOW)),
    "gemma4-nested": ("gemma4", nested("gemma4_text", VISION, audio_config=None, video_token_id=95, audio_token_id=96,
                                       **LAYER_EMBEDDINGS)),
    "mistral3-nested": ("mistral3", nested("ministral3", dict(PIXTRAL, model_type="pixtral"),
                                           rope_parameters=SCALED)),
    "qwen2-vl-nested": ("qwen2_vl", nested("qwen2_vl_text", dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2,
                                                                 patch_size=4), rope_parameters=AXES)),
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
    "glm4v-nested": ("glm4v", nested("glm4v_text", dict(QWEN_VISION, image_size=16), rope_parameters=AXES)),
}  # fmt: skip
EAGER = ("gemma2-window-softcap", "gpt-oss-sinks")  # soft-capping and sinks are not in PyTorch's attention
WHOLE = dict(prefix_sharing=False)
# (gradient checkpointing, settings); rows have 10 to 18 tokens, completions with the last prompt token 1 to 8
SETTINGS = (
    (False, dict(tokens_per_forward=1)),
    (False, dict(completions_per_forward=3)),
    (False, dict()),
    (False, dict(tokens_per_forward=9)),
    (False, dict(WHOLE, tokens_per_forward=36)),
    (True, dict(tokens_per_forward=16)),
    (True, dict(WHOLE, tokens_per_forward=1)),
)
EXPERTS = ("qwen3-moe", "mixtral", "gpt-oss-sinks")
# What is tried in more than float64: one of each kind of attention. Rounding sees arithmetic, not classes.
ROUNDED = (
    "llama", "qwen3", "qwen2-window", "gemma2-window-softcap", "gpt-neox", "mixtral", "gpt-oss-sinks",
    "deepseek-latents", "gemma4-layer-embeddings", "qwen3-vl-nested",
)  # fmt: skip


def passes_of(prefix_length, prefix_sharing=True, **options):
    """What the trainers hand to the model for these options."""
    return (SharedPrefixPasses if prefix_sharing else TokenBudgetPasses)(prefix_length, **options)


def build(name, dtype, seed=0):
    model_type, extra = ARCHITECTURES[name]
    torch.manual_seed(seed)
    extra = copy.deepcopy(extra)  # configs complete the dictionaries that they are given
    config = CONFIG_MAPPING[model_type](**(extra if name.endswith("-nested") else {**SHAPE, **extra}))
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    make = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model = make.from_config(config, attn_implementation="eager" if name in EAGER else "sdpa")
    for parameter in model.parameters():  # larger than at initialisation, so that attention matters
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    if name in EXPERTS:
        model.set_experts_implementation("eager")  # the others do not know float64
    model.to(dtype).train()
    utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model


def batch(seed=7):
    """Two prompts with three completions each: left padding, completions of 1 to 7 tokens, one without any token."""
    prompt, completion = 11, 7
    torch.manual_seed(seed)
    ids = torch.randint(3, FIRST_SPECIAL, (6, prompt + completion))
    ids[:3, :prompt], ids[3:, :prompt] = ids[0, :prompt], ids[3, :prompt]
    mask = torch.ones_like(ids)
    mask[3:, :4] = 0
    for row, length in enumerate((7, 3, 1, 5, 0, 2)):
        mask[row, prompt + length :] = 0
    return ids, mask, prompt


def run(model, name, seeds=(7,), **shared):
    """(log-probabilities and entropies, gradient of all parameters, loss) of each batch, in float64."""
    return tuple(map(torch.stack, zip(*(run_batch(model, name, seed, **shared) for seed in seeds), strict=True)))


def run_batch(model, name, seed, **shared):
    ids, mask, prompt = batch(seed)
    if name in EXPERTS:
        shared = dict(shared, output_router_logits=True)
    return run_inputs(model, dict(input_ids=ids, attention_mask=mask), prompt, **shared)


def run_inputs(model, inputs, prompt, **shared):
    ids = inputs["input_ids"]
    labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :prompt] = -100
    model.zero_grad()
    out = model(**inputs, labels=labels, fused_lm_head=True, **shared)
    columns = ids.shape[1] - prompt
    tokens = torch.stack([out.log_probs[:, -columns:], out.entropy[:, -columns:]])
    weights = torch.linspace(-1, 1, ids.shape[0] * columns, device=tokens.device).view(1, -1, columns)
    weights = weights * torch.tensor([1.0, 0.1], device=tokens.device).view(2, 1, 1)
    loss = (tokens * weights).sum() + (out.aux_loss if out.aux_loss is not None else 0)
    loss.backward()
    return tokens.detach().double(), gradient_of(model), loss.detach().double()


def gradient_of(module):
    gradients = [p.grad.flatten().double() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients or [torch.zeros(1)])


def error(got, truth):
    return ((got - truth).norm() / truth.norm()).item()


def error_of_batches(got, truth):
    """The median, which does not see that a token went to another expert in one of them."""
    return torch.tensor([error(x, y) for x, y in zip(got, truth, strict=True)]).quantile(0.5).item()


def errors_of(name, dtype, autocast=None):
    """With `autocast`, the model computes in that dtype in mixed precision and the truth is `dtype` throughout."""
    half = torch.bfloat16 in (dtype, autocast)
    # Rounding errors of one batch are a small sample, and steps, where a token goes to another expert, a smaller one
    seeds = range(7, 16 if name in EXPERTS else 11) if half else (7,)
    model = build(name, dtype)
    truth = run(model, name, seeds)
    precision = torch.autocast("cpu", autocast, enabled=autocast is not None)
    with precision:
        stock = run(model, name, seeds)
    if dtype == torch.bfloat16:
        with pure_float64():
            truth = run(build(name, dtype).double(), name, seeds)
    enable_prefix_sharing(model)
    errors = {"tokens": [], "gradient": [], "loss": []}  # by setting
    for checkpointing, settings in SETTINGS[1::2] if half else SETTINGS:
        if checkpointing:
            model.gradient_checkpointing_enable()
        with precision:
            tokens, gradient, loss = run(model, name, seeds, passes=passes_of(batch()[2], **settings))
        for kind, got, expected in zip(errors, (tokens, gradient, loss), truth, strict=True):
            errors[kind].append(error_of_batches(got, expected))
    with precision:
        off = run(model, name, seeds)  # enabled but not used: the attention that the model was loaded with
    errors["off_is_equal"] = all(torch.equal(x, y) for x, y in zip(off[:2], stock[:2], strict=True))
    stock_errors = [error_of_batches(got, expected) for got, expected in zip(stock, truth, strict=True)]
    return errors | dict(zip(("stock_tokens", "stock_gradient"), stock_errors[:2], strict=True))


if __name__ == "__main__":
    results = {}
    for precision in sys.argv[1:]:  # a dtype, or two: that of the weights + that of autocast
        dtypes = [getattr(torch, name) for name in precision.split("+")]
        with pure_float64() if dtypes == [torch.float64] else contextlib.nullcontext():
            names = ARCHITECTURES if dtypes == [torch.float64] else ROUNDED
            results[precision] = {name: errors_of(name, *dtypes) for name in names}
    print(json.dumps(results))
