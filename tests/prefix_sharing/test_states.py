"""Models with recurrent or convolutional states: what is refused, and that their hand-over is checked."""

from itertools import product

import pytest
import torch
from kinds import STATES
from torch import nn

from experiments.checks.family_check import prepared
from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.nodes import Node
from rloo_memory.prefix_sharing.states import States, find_mixers, ignores_state

REFUSED = {
    **dict.fromkeys(("zamba", "zamba2", "zaya"), "Layers "),
    "jamba": "Layers [0, 2]",  # which do not pass on what would tell a mixer where its state is
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "minimax"), "linear_attention"),
    **dict.fromkeys(("rwkv", "xlstm"), "AttentionInterface"),
}


def without(state):
    """What a node hands over, with zeros in place of that state."""
    read = Node.read
    return lambda self, slot, *args, **kwargs: read(self, slot, *args, **kwargs) * (0 if slot[1] == state else 1)


UPDATE = States.update_conv_state


def one_off(self, x, layer, state=0, **kwargs):
    before = self.get_conv_state(layer, state)
    return UPDATE(self, x, layer, state, **kwargs) if before is None else torch.cat([before.roll(1, -1), x], -1)


BROKEN = {
    "no recurrent state": (Node, "read", without("recurrent")),
    "no columns": (Node, "read", without("conv")),
    "columns one off": (States, "update_conv_state", one_off),
}
# Short convolutions have no recurrent state, and in half precision one column off is less than what is tolerated
HAND_OVERS = [
    (name, what, dtype)
    for name, what, dtype in product(STATES, BROKEN, (torch.float32, torch.bfloat16))
    if not name.startswith("lfm") or what == "no columns" or (what, dtype) == ("columns one off", torch.float32)
]


def refusal(model):
    """Why it is refused, if it is, and as it was behind that."""
    try:
        enable_prefix_sharing(model)
    except ValueError as reason:
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        return str(reason)


class TestPrefixSharingStates:
    def test_gradients_of_a_state_are_summed_in_float32(self):
        state = torch.ones(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)
        prefix = Node(torch.arange(2))
        prefix.write((0, "conv", 0), state)
        sum(prefix.read((0, "conv", 0), num_rows=2).sum().float() for _ in range(512)).backward()
        # A sum in bfloat16 ends at 512, where 2 is less than its last digit
        torch.testing.assert_close(state.grad, torch.full_like(state, 1024))

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_shared_is_refused(self, name):
        message = refusal(build(family(name)))
        assert message and "`prefix_sharing=False`" in message and REFUSED[name] in message

    @pytest.mark.slow
    @pytest.mark.parametrize("name, what, dtype", HAND_OVERS)
    def test_a_wrong_hand_over_is_noticed(self, name, what, dtype, monkeypatch):
        owner, attribute, value = BROKEN[what]
        monkeypatch.setattr(owner, attribute, value)
        assert refusal(prepared(build(family(name)), dtype))

    def test_state_that_is_not_taken(self):
        # PyTorch's scan of Mamba-1 always starts from zero
        mixers = [find_mixers(build(family(name)))[0] for name in ("jamba", "qwen3_next", "bamba")]
        assert [ignores_state(mixer, Node(torch.arange(2)), 32) for mixer in mixers] == [True, False, False]

    @pytest.mark.parametrize("called", ["cache", "cache_params", "past_key_values"])
    def test_a_layer_with_a_state_is_known_by_its_cache_whatever_a_release_calls_it(self, called):
        """transformers 5.24 calls it `cache` everywhere."""

        class Mixer(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1d = nn.Conv1d(1, 1, 1)

        scope = {}
        exec(f"def forward(self, hidden_states, {called}=None): ...", scope)
        Mixer.forward = scope["forward"]
        model = nn.Sequential(Mixer(), nn.Linear(1, 1))
        assert find_mixers(model) == [model[0]]
