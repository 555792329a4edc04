"""
Prefix sharing: what a run of tokens leaves for those that continue it, by slot, and where the gradients of reads add
up.

A prompt leaves it for its completions, and what prompts begin with for the prompts: nodes of a tree. A slot is
`(layer, kind)` or, for a state of a layer, `(layer, kind, number of the state)`.

Shape suffixes: S tokens of a node, D head size.
"""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from transformers import PretrainedConfig

from .states import layers_by_kind

KEY, VALUE, ROUTER = "key", "value", "router"


class Gradient(Enum):
    """Where the gradient of a read goes."""

    ENDS = auto()  # adds up in the node, which has a backward of its own
    JOINS = auto()  # adds up with those of other reads, and goes on through the node with them
    ALONE = auto()  # goes on through the node: there is no other read


def _without_storage(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1, dtype=torch.promote_types(x.dtype, torch.float32)).expand(x.shape)


class _Anchor(torch.autograd.Function):
    """Identity without storage. The gradients of reads add up in it, in float32 at least, before they reach `x`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return _without_storage(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


class _Read(torch.autograd.Function):
    """`x`, whose gradient goes to an anchor, in the anchor's dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.dtype = anchor.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad.to(ctx.dtype)


class Node:
    """
    What tokens at positions of shape `(S,)` leave: keys and values of layers, states of convolutions and recurrences,
    and how likely each expert is chosen.
    """

    def __init__(self, positions: torch.Tensor):
        self.positions = positions
        self.offset = 0  # what rotary positions behind it are ahead of positions, which may be those of columns
        self.slots: dict[tuple, torch.Tensor] = {}
        # Layer whose keys and values each layer attends to: itself, or an earlier one (Gemma 3n, Gemma 4)
        self.sources: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}  # as layers computed them
        self._experts: tuple[torch.Tensor, int] | None = None
        self.ends: dict[tuple, torch.Tensor] = {}  # leaves, in which the gradients of reads that end here add up
        self._joins: dict[tuple, torch.Tensor] = {}  # anchors of reads that go on

    def write(self, slot: tuple, x: torch.Tensor) -> None:
        self.slots[slot] = x

    def write_attention(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values of a layer, of shape `(1, num_key_value_heads, S, D)` each."""
        self.sources[layer_idx] = next((idx for idx, seen in self._keys.items() if seen is key), layer_idx)
        if self.sources[layer_idx] != layer_idx:
            return
        self._keys[layer_idx] = key
        size = len(self.positions)  # where there is no token, what went through is not part of the prompt
        self.write((layer_idx, KEY), key if size > 0 else key[:, :, :0])
        self.write((layer_idx, VALUE), value if size > 0 else value[:, :, :0])

    def write_router(self, sums: tuple[torch.Tensor, torch.Tensor, int]) -> None:
        """Sums over its tokens, see `router_sums`."""
        chosen, probs, count = sums
        self._experts = (chosen, count)
        self.write((None, ROUTER), probs)

    def read(self, slot: tuple, num_rows: int = 1, gradient: Gradient = Gradient.JOINS) -> torch.Tensor:
        """What is in a slot, once for each of so many rows, and whose gradient goes where `gradient` says."""
        x = self.slots[slot]
        shape = (num_rows, *x.shape[1:]) if num_rows > 1 else x.shape
        # The gradients of several rows add up even in a read that is alone
        is_alone = gradient is Gradient.ALONE and slot[1] in (KEY, VALUE)
        if is_alone or not (x.requires_grad and torch.is_grad_enabled()):
            return x.expand(shape)
        if gradient is Gradient.ENDS and x.numel() == 0:
            return x.detach().expand(shape)
        anchor = self._end(slot) if gradient is Gradient.ENDS else self._join(slot)
        return _Read.apply(x.detach().expand(shape), anchor.expand(shape))

    def read_router(self, gradient: Gradient) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """What was written of the router, if anything was."""
        if self._experts is None:
            return None
        return self._experts[0], self.read((None, ROUTER), gradient=gradient), self._experts[1]

    def _end(self, slot: tuple) -> torch.Tensor:
        if slot not in self.ends:
            self.ends[slot] = _without_storage(self.slots[slot]).requires_grad_()
        return self.ends[slot]

    def _join(self, slot: tuple) -> torch.Tensor:
        ends = self.ends  # not the node, which would hold itself

        def add_what_ended_here(grad: torch.Tensor) -> torch.Tensor:
            leaf = ends.get(slot)
            if leaf is None or leaf.grad is None:
                return grad
            before, leaf.grad = leaf.grad, None
            return before.add_(grad)

        if slot not in self._joins:
            self._joins[slot] = _Anchor.apply(self.slots[slot])
            self._joins[slot].register_hook(add_what_ended_here)
        return self._joins[slot]

    def backward(self) -> None:
        """Backward from the gradients that ended here, if no read has taken them on through it. None ends here now."""
        slots = [slot for slot, leaf in self.ends.items() if leaf.grad is not None]
        gradients = [self.ends.pop(slot).grad.to(self.slots[slot].dtype) for slot in slots]
        self.ends.clear()
        if slots:
            torch.autograd.backward([self.slots[slot] for slot in slots], gradients)

    def take_attention(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, which are not kept any longer."""
        del self._keys[layer_idx]
        return self.slots.pop((layer_idx, KEY)), self.slots.pop((layer_idx, VALUE))

    def states_of(self, layer_idx: int) -> list[tuple]:
        """Slots of the states of a layer."""
        return [slot for slot in self.slots if slot[0] == layer_idx and len(slot) == 3]

    def missing_layers(self, config: PretrainedConfig) -> list[int]:
        """Indices of the layers that did not leave what they should, or left what they should not."""
        attending, with_state = layers_by_kind(config)
        recorded = {slot[0] for slot in self.slots if len(slot) == 3}
        # Attention that several layers share may not know the layer that it is in
        return sorted((attending ^ self.sources.keys()) | (with_state ^ recorded), key=str)


@dataclass(frozen=True)
class Path:
    """
    What a pass continues: nodes from the root of a tree on, and where the gradient of what it reads of each goes.
    Layers attend to all of them, and start from the states of the last.
    """

    nodes: tuple[Node, ...]
    gradients: tuple[Gradient, ...]

    @classmethod
    def of(cls, *nodes: Node) -> "Path":
        """Nodes whose backward is that of the pass."""
        return cls(nodes, (Gradient.JOINS,) * len(nodes))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(len(node.positions) for node in self.nodes)

    @property
    def path_positions(self) -> torch.Tensor:
        """Positions of all tokens, of shape `(size,)`."""
        return torch.cat([node.positions for node in self.nodes])

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def slots(self) -> dict[tuple, torch.Tensor]:
        return self.last.slots

    def read(self, slot: tuple, num_rows: int = 1) -> torch.Tensor:
        return self.last.read(slot, num_rows, self.gradients[-1])

    def read_attention(self, layer_idx: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each node."""
        layer_idx = self.last.sources[layer_idx]
        return [
            tuple(node.read((layer_idx, kind), gradient=gradient) for kind in (KEY, VALUE))
            for node, gradient in zip(self.nodes, self.gradients, strict=True)
        ]


def watch_backward(states: torch.Tensor, prefixes: list[Path]) -> None:
    """Have a backward from `states` fail that does not reach the prompts while their own backward is still to come."""
    # Each pass behind a node reads its keys and values, and the states of the last. What is trained decides which of
    # them have a gradient. A graph must not hold the node, which has one of its own
    ending = (
        (node.ends, slot)
        for prefix in prefixes
        for node, at in zip(prefix.nodes, prefix.gradients, strict=True)
        for slot in node.ends
        if at is Gradient.ENDS and (slot[1] in (KEY, VALUE) or len(slot) == 3 and node is prefix.last)
    )
    watched = next(ending, None)
    if watched is None or not states.requires_grad:
        return
    ends, slot = watched
    leaf = ends[slot]

    def check(grad: torch.Tensor) -> None:
        if ends.get(slot) is not leaf:
            raise RuntimeError(
                "A backward comes behind that of its prompts, and would lack their part. In a loop, call it in the "
                "`with` block of `shared_prompts`."
            )
        if not torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node):
            raise RuntimeError(
                "Gradients were asked for (`torch.autograd.grad`, or a backward with `inputs`) in the middle of an "
                "update, where they lack the part of prompts whose backward is still to come. In a trainer, set "
                "`per_device_train_batch_size` to a multiple of `num_generations`; in a loop, ask `log_probs` in "
                "place of `shared_prompts`."
            )

    states.register_hook(check)
