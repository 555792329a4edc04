"""What is refused of models with recurrent or convolutional states: families, and then those that can be shared, with
each way of handing their states over wrongly. Prints the errors of both."""

import json
import logging
from unittest import mock

import shared_exactness
import torch
from architectures import ARCHITECTURES, MIXED, STATES
from shared_exactness import build, build_random

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.nodes import Node
from rloo_memory.prefix_sharing.states import ReadStates

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


def refusal(model):
    try:
        enable_prefix_sharing(model)
    except ValueError as reason:
        hooks = [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
        return f"{reason} | {model.config._attn_implementation} | {len(hooks)} hooks"
    return None


def zero(name):
    read = Node.read
    return lambda self, slot, *args, **kwargs: read(self, slot, *args, **kwargs) * (0 if slot[1] == name else 1)


BROKEN = {
    "no recurrent state": (Node, "read", zero("recurrent")),
    "no columns": (Node, "read", zero("conv")),
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
                results[key] = {family: refusal(build(family, dtype)) for family in STATES}
    return results


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    ARCHITECTURES.update(REFUSED)
    shared_exactness.EAGER += WITHOUT_ATTENTION
    refusals = {name: refusal(build_random(name, torch.float32)) for name in REFUSED}
    print(json.dumps({"refusals": refusals, "broken": broken()}))
