import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BambaConfig, JambaConfig, Qwen3NextConfig

from experiments.fused_head import add_fused_lm_head
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.nodes import Node
from rloo_memory.prefix_sharing.states import find_mixers, ignores_state

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS = {
    "gated_delta_net": Qwen3NextConfig(
        **SHAPE,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        mlp_only_layers=[0, 1, 2],
    ),
    "mamba2": BambaConfig(
        **SHAPE, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8
    ),
}


def build(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for param in model.parameters():  # larger than at initialization, so that states matter
        param.data.mul_(4 if param.dim() > 1 else 1)
    add_fused_lm_head(model)
    return model


class TestPrefixSharingStates:
    def test_gradients_of_a_state_are_summed_in_float32(self):
        state = torch.ones(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)
        prefix = Node(torch.arange(2))
        prefix.write((0, "conv", 0), state)
        sum(prefix.read((0, "conv", 0), num_rows=2).sum().float() for _ in range(512)).backward()
        # A sum in bfloat16 ends at 512, where 2 is less than its last digit
        torch.testing.assert_close(state.grad, torch.full_like(state, 1024))

    def test_state_that_does_not_arrive(self):
        # The layers of Jamba do not pass on what would tell a mixer where its state is
        config = JambaConfig(
            **SHAPE, attn_layer_period=3, attn_layer_offset=1, num_experts=1, mamba_d_state=8, mamba_dt_rank=4
        )
        model = build(config)
        with pytest.raises(ValueError, match=r"Layers \[0, 2\]"):
            enable_prefix_sharing(model)
        assert model.config._attn_implementation == "sdpa"
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_state_that_is_not_taken(self):
        config = JambaConfig(**SHAPE, num_experts=1, mamba_d_state=8, mamba_dt_rank=4)
        # PyTorch's scan of Mamba-1 always starts from zero
        mixers = [find_mixers(build(config))[0], *[find_mixers(build(config))[0] for config in CONFIGS.values()]]
        assert [ignores_state(mixer, Node(torch.arange(2)), 32) for mixer in mixers] == [True, False, False]
