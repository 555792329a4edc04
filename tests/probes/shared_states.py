"""Models with recurrent or convolutional states: what shared_exactness and shared_decoding do for the others, and what
only states can get wrong. `shared_states.py PART ...` prints the results of each part by its name, or by the precision
for "exactness PRECISION" and "decoding PRECISION".

A decoding step of Nemotron-H does not raise the time step to `time_step_min`, as a longer sequence does (transformers
5.23), and with sharing, the last token of the prompt is a decoding step. So that it decodes alike, the minimum is low.
"""

import contextlib
import functools
import json
import logging
import sys
from unittest import mock

import shared_accumulation
import shared_decoding
import shared_exactness
import shared_shapes
import shared_trainer
import torch
from peft import LoraConfig
from shared_exactness import DELTA, MIXED, pure_float64
from transformers import CONFIG_MAPPING
from trl.prefix_sharing.enabling import enable_prefix_sharing
from trl.prefix_sharing.memory import SharedPrefix
from trl.prefix_sharing.states import ReadStates, find_mixers

CONV = dict(layer_types=["conv", "full_attention", "conv"])
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
    "nemotron-h": ("nemotron_h", dict(layers_block_type=[MIXED[0], "moe", *MIXED[1:], "mlp"],
                                      mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=8,
                                      n_routed_experts=4, moe_shared_expert_intermediate_size=24, time_step_min=1e-12,
                                      **MOE)),
    "falcon-h1": ("falcon_h1", dict(MAMBA2, mamba_d_ssm=64)),  # every layer attends and has a state
    "lfm2": ("lfm2", dict(CONV, block_auto_adjust_ff_dim=False)),
    "lfm2-moe": ("lfm2_moe", dict(CONV, num_experts=4, num_dense_layers=1, **MOE)),
    "lfm3": ("lfm3", dict(CONV, conv_L_cache=4)),
}  # fmt: skip
WITHOUT_EXPERTS = ("qwen3.5", "olmo-hybrid", "bamba", "falcon-h1", "lfm2", "lfm3")
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
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon-mamba", "rwkv", "xlstm")  # so that they know no implementation of it
ALL = {**FAMILIES, **REFUSED}
build_random = shared_exactness.build


@functools.cache
def weights(name):
    """Those of a model that forgets slowly: at initialization, hardly anything of a prompt is left in the states. The
    token that goes through where there is no prefix, that of padding, leaves something, too."""
    values = build_random(name, torch.float32).state_dict()
    for parameter in values:
        if parameter.endswith("A_log"):
            values[parameter].fill_(-2)
        elif parameter.endswith("conv1d.weight"):
            values[parameter].mul_(8)
        elif "embed" in parameter and values[parameter].shape[0] == shared_exactness.VOCAB:
            values[parameter][0] = values[parameter][1]
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


def of_families(measure, precision):
    """`precision` is a dtype, or two for mixed precision. All families in float64, and one or two of a kind of mixer
    where rounding is judged: those without experts, because rounding sends a token to another expert now and then,
    with sharing or without, and one such token of a batch is more than all else. Of six seeds, Qwen3.5-MoE had that
    once with sharing alone (0.6 % instead of 0.1 %), else equal errors."""
    dtypes = [getattr(torch, name) for name in precision.split("+")]
    names = FAMILIES if dtypes == [torch.float64] else WITHOUT_EXPERTS
    for name in names:
        weights(name)
    with pure_float64() if dtypes == [torch.float64] else contextlib.nullcontext():
        return {name: measure(name, *dtypes) for name in names}


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
    read = SharedPrefix.read
    return lambda self, slot, rows=1: read(self, slot, rows) * (0 if slot[1] == name else 1)


BROKEN = {
    "no recurrent state": (SharedPrefix, "read", zero("recurrent")),
    "no columns": (SharedPrefix, "read", zero("conv")),
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


# (family, options of shared_trainer.train). LoRA goes on all linear layers, those of mixers too
TRAININGS = {
    "rloo, passes of 2": ("qwen3.5", dict(tokens=2 * 7)),
    "rloo, passes of 9 tokens": ("bamba", dict(batch=8, tokens=9)),
    "rloo, no checkpointing": ("lfm2", dict(gradient_checkpointing=False, tokens=3 * 7)),
    "rloo, one-token completions": ("kimi-linear", dict(experts=True, max_completion_length=1)),
    "rloo, all truncated": ("falcon-h1", dict(mask_truncated_completions=True, ends=1)),
    "rloo, LoRA": ("bamba", dict(lora="config", tokens=2 * 7)),
    "grpo, reference": ("falcon-h1", dict(trainer="grpo", beta=0.05, tokens=2 * 7)),
    "grpo, two iterations": ("olmo-hybrid", dict(trainer="grpo", num_iterations=2, gradient_accumulation_steps=2)),
    "grpo, LoRA": ("qwen3-next", dict(trainer="grpo", experts=True, lora="config", tokens=3 * 7)),
    "grpo, experts": ("qwen3.5-moe", dict(trainer="grpo", experts=True, batch=8)),
    "rloo, experts": ("granite-hybrid", dict(experts=True, tokens=2 * 7)),
    "grpo, experts without their loss": ("granite-hybrid", dict(trainer="grpo", experts=True, beta=0.05)),
    "grpo, convolutions": ("lfm2", dict(trainer="grpo", tokens=2 * 7)),
    "grpo, whole rows": ("granite-hybrid", dict(trainer="grpo", experts=True, batch=8, tokens=40, whole=True)),
}


def trainings(*names):
    """Whole runs with sharing against stock's, as in shared_trainer."""
    results = {}
    for what in names or TRAININGS:
        family, options = TRAININGS[what]
        model_type, extra = FAMILIES[family]

        def config(model_type=model_type, extra=extra, **shape):
            return CONFIG_MAPPING[model_type](**{**shape, "num_hidden_layers": 3, **extra})

        def lora(target_modules, **kwargs):
            return LoraConfig(target_modules="all-linear", **kwargs)

        with (
            mock.patch.object(shared_trainer, "Qwen3Config", config),
            mock.patch.object(shared_trainer, "Qwen3MoeConfig", config),
            mock.patch.object(shared_trainer, "LoraConfig", lora),
        ):
            results[f"{what}, {family}"] = shared_trainer.compare(**options)
    return results


def shapes():
    """Number of random batches tried."""
    for family in FAMILIES:
        weights(family)
    families = ("qwen3.5", "kimi-linear", "bamba", "falcon-h1", "lfm2")
    return {family: shared_shapes.try_batches([family], 10, longest=20) for family in families}


def accumulation():
    """Relative errors of the gradient of the mixers, as in shared_accumulation."""
    families = ("qwen3.5", "bamba", "lfm2")
    return {name: shared_accumulation.errors_of(functools.partial(build, name), find_mixers) for name in families}


PARTS = {
    "refusals": refusals,
    "broken": broken,
    "trainings": trainings,
    "accumulation": accumulation,
    "shapes": shapes,
}
MEASURES = {"exactness": shared_exactness.errors_of, "decoding": shared_decoding.errors_of}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = {}
    for part in sys.argv[1:]:
        if part in PARTS:
            results[part] = PARTS[part]()
        else:
            name, precision = part.split()
            results[precision] = of_families(MEASURES[name], precision)
    print(json.dumps(results))
