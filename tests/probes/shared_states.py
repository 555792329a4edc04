"""Models with recurrent or convolutional states: what shared_exactness and shared_decoding do for the others, and what
only states can get wrong. `shared_states.py PART ...` prints the results of each part by its name.

A decoding step of Nemotron-H does not clamp the time step as a longer sequence does (transformers 5.23), and with
sharing, the last token of the prompt is a decoding step.
"""

import contextlib
import functools
import json
import logging
import sys
from unittest import mock

import shared_decoding
import shared_exactness
import torch
from shared_exactness import batch, error, passes_of, pure_float64, run
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl.models.prefix_sharing import SharedPrefix, enable_prefix_sharing
from trl.models.prefix_sharing_states import ReadStates

MIXED = ["linear_attention", "full_attention", "linear_attention"]
CONV = dict(layer_types=["conv", "full_attention", "conv"])
DELTA = dict(
    layer_types=MIXED, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6
)
# Chunks of 8 tokens: the prompts end within one
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24, experts_implementation="eager")
LATENTS = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
FAMILIES = {
    "qwen3-next": ("qwen3_next", dict(DELTA, num_experts=4, shared_expert_intermediate_size=24, **MOE)),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", dict(DELTA, num_experts=4, shared_expert_intermediate_size=24, **MOE)),
    "olmo-hybrid": ("olmo_hybrid", DELTA),
    "kimi-linear": ("kimi_linear", dict(layer_types=MIXED, linear_head_dim=8, linear_num_heads=4, num_local_experts=4,
                                        **LATENTS, **MOE)),
    "bamba": ("bamba", dict(MAMBA2, attn_layer_indices=[1])),
    "granite-hybrid": ("granitemoehybrid", dict(MAMBA2, layer_types=MIXED, num_local_experts=4,
                                                shared_intermediate_size=24, **MOE)),
    "nemotron-h": ("nemotron_h", dict(layers_block_type=["linear_attention", "moe", "full_attention", *MIXED[:1], "mlp"],
                                      mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=8,
                                      n_routed_experts=4, moe_shared_expert_intermediate_size=24, **MOE)),
    "falcon-h1": ("falcon_h1", dict(MAMBA2, mamba_d_ssm=64)),  # every layer attends and has a state
    "lfm2": ("lfm2", dict(CONV, block_auto_adjust_ff_dim=False)),
    "lfm2-moe": ("lfm2_moe", dict(CONV, num_experts=4, num_dense_layers=1, **MOE)),
    "lfm3": ("lfm3", dict(CONV, conv_L_cache=4)),
}  # fmt: skip
ROUTER_LOSS = ("qwen3-next", "qwen3.5-moe")  # of the others, TRL does not know the number of experts
MAMBA1 = dict(mamba_d_state=8, mamba_dt_rank=4)
HYBRID = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, num_key_value_heads=4)
REFUSED = {
    "jamba": ("jamba", dict(MAMBA1, attn_layer_period=3, attn_layer_offset=1, num_experts=1)),
    "zamba": ("zamba", dict(MAMBA1, **HYBRID, attention_head_dim=16)),
    "zamba2": ("zamba2", dict(HYBRID, mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=2, chunk_size=8)),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", dict(num_heads=4, head_dim=16, n_groups=2, state_size=8, chunk_size=8)),
    "falcon-mamba": ("falcon_mamba", {}),
    "rwkv": ("rwkv", {}),
    "xlstm": ("xlstm", dict(num_heads=4)),
    "recurrent-gemma": ("recurrent_gemma", dict(lru_width=32, block_types=["recurrent", "attention", "recurrent"])),
    "minimax": ("minimax", dict(layer_types=MIXED, block_size=8, num_local_experts=4)),
    "zaya": ("zaya", dict(num_hidden_layers=2, num_experts=4)),
}
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon-mamba", "rwkv", "xlstm")  # they know no implementation but the eager one
ALL = {**FAMILIES, **REFUSED}
build_random = shared_exactness.build


@functools.cache
def weights(name):
    """Those of a model that forgets slowly: at initialization, hardly anything of a prompt is left in the states."""
    values = build_random(name, torch.float32).state_dict()
    for parameter in values:
        if parameter.endswith("A_log"):
            values[parameter].fill_(-2)
        elif parameter.endswith("conv1d.weight"):
            values[parameter].mul_(8)
    return values


def build(name, dtype, seed=0):
    """Some families draw their first weights in an explicit float32, which is another dtype in `pure_float64`."""
    model = build_random(name, dtype, seed)
    model.load_state_dict(weights(name))
    return model


shared_exactness.ARCHITECTURES.clear()
shared_exactness.ARCHITECTURES.update(ALL)
shared_exactness.EXPERTS, shared_exactness.EAGER = ROUTER_LOSS, WITHOUT_ATTENTION
shared_exactness.build = shared_decoding.build = build


def precisions(measure, *names):
    """Of every family, in each precision: a dtype, or two for mixed precision."""
    results = {}
    for precision in names:
        dtypes = [getattr(torch, name) for name in precision.split("+")]
        for name in FAMILIES:
            weights(name)
        with pure_float64() if dtypes == [torch.float64] else contextlib.nullcontext():
            results[precision] = {name: measure(name, *dtypes) for name in FAMILIES}
    return results


def refusal(model):
    try:
        enable_prefix_sharing(model)
    except ValueError as reason:
        hooks = [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
        return f"{reason} | {model.config._attn_implementation} | {len(hooks)} hooks"
    return None


def refusals():
    return {name: refusal(build_random(name, torch.float32)) for name in REFUSED}


def zero(name):
    read = SharedPrefix.read_state
    return lambda self, key, rows: read(self, key, rows) * (0 if key[2] == name else 1)


BROKEN = {
    "no recurrent state": (SharedPrefix, "read_state", zero("recurrent")),
    "no columns": (SharedPrefix, "read_state", zero("conv")),
    "columns one off": (ReadStates, "update_conv_state", lambda self, x, layer, state=0, **kwargs: torch.cat(
        [self.get_conv_state(layer, state).roll(1, -1), x], -1)),
}  # fmt: skip


def broken():
    """Errors that the check of a model finds when the hand-over is broken, by dtype."""
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for what, (owner, name, value) in BROKEN.items():
            with mock.patch.object(owner, name, value):
                key = f"{what}, {str(dtype).removeprefix('torch.')}"
                results[key] = {family: refusal(build(family, dtype)) for family in FAMILIES}
    return results


PARTS = {
    "exactness": lambda: precisions(shared_exactness.errors_of, "float32", "float64"),
    "half": lambda: precisions(shared_exactness.errors_of, "bfloat16", "float32+bfloat16"),
    "decoding": lambda: precisions(
        shared_decoding.errors_of, "float64", "bfloat16", "float32+bfloat16", "float32+float16"
    ),
    "refusals": refusals,
    "broken": broken,
}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps({part: PARTS[part]() for part in sys.argv[1:]}))
