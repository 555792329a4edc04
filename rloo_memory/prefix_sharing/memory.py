"""
Prefix sharing: what tokens leave for those that continue them, by slot, and where the gradients of what is read add up.

A prompt leaves it for its completions, and what all prompts begin with for the prompts: prefixes are nodes of a tree. A
slot is `(layer, kind)` or, for a state of a layer, `(layer, kind, number of the state)`.

Shape suffixes: S prefix tokens, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig

from .states import layers_by_kind


KEY, VALUE, ROUTER = "key", "value", "router"


def _without_storage(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1, dtype=torch.promote_types(x.dtype, torch.float32)).expand(x.shape)


class _Anchor(torch.autograd.Function):
    """Identity without storage. The gradients of all reads add up in it, in float32 at least, before they reach `x`."""

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


class SharedPrefix:
    """
    What the tokens of a prefix leave: keys and values of layers, states of convolutions and recurrences, and how likely
    they chose each expert.

    Args:
        positions (`torch.Tensor` of shape `(S,)`):
            Position of each of its tokens.
        offset (`int`, *optional*, defaults to `0`):
            What the rotary positions behind the prefix are ahead of `positions`, which may be those of columns.
        read_once (`bool`, *optional*, defaults to `False`):
            Whether a single pass reads its keys and values, so that no gradients of passes add up.
        parent ([`SharedPrefix`], *optional*):
            Prefix that its tokens continue.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        offset: int = 0,
        read_once: bool = False,
        parent: "SharedPrefix | None" = None,
    ):
        self.positions = positions
        self.parent = parent
        self.offset = offset
        self.read_once = read_once
        self.slots: dict[tuple, torch.Tensor] = {}
        self.anchors: dict[tuple, torch.Tensor] = {}
        # Layer whose keys and values each layer attends to: itself, or an earlier one (Gemma 3n, Gemma 4)
        self.sources: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}  # as layers computed them
        self._experts: tuple[torch.Tensor, int] | None = None

    @property
    def path(self) -> "list[SharedPrefix]":
        """The prefixes that its tokens continue, and itself."""
        return [*([] if self.parent is None else self.parent.path), self]

    @property
    def size(self) -> int:
        """Number of tokens of its path."""
        return sum(len(prefix.positions) for prefix in self.path)

    @property
    def path_positions(self) -> torch.Tensor:
        """Positions of the tokens of its path, of shape `(size,)`."""
        return torch.cat([prefix.positions for prefix in self.path])

    def write(self, slot: tuple, x: torch.Tensor) -> None:
        self.slots[slot] = x

    def write_attention(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values of a layer, of shape `(1, num_key_value_heads, S, D)` each."""
        self.sources[layer_idx] = next((idx for idx, seen in self._keys.items() if seen is key), layer_idx)
        if self.sources[layer_idx] != layer_idx:
            return
        self._keys[layer_idx] = key
        size = len(self.positions)  # where there is no prefix, what went through is not part of the prompt
        self.write((layer_idx, KEY), key if size > 0 else key[:, :, :0])
        self.write((layer_idx, VALUE), value if size > 0 else value[:, :, :0])

    def write_router(self, sums: tuple[torch.Tensor, torch.Tensor, int]) -> None:
        """Sums over its tokens, see `router_sums`."""
        chosen, probs, count = sums
        self._experts = (chosen, count)
        self.write((None, ROUTER), probs)

    def lead_on(self) -> None:
        """
        From here on, the gradients of reads, and those that ended here before, go on through the prefix. For prompts to
        be called when all have gone through the model: then none of these gradients is in float32 any longer when the
        backward enters the first of them.
        """
        self.anchors = {
            slot: self._anchor(slot)
            for slot, x in self.slots.items()
            if x.requires_grad and not (self.read_once and slot[1] in (KEY, VALUE))
        }

    def _anchor(self, slot: tuple) -> torch.Tensor:
        """An anchor of a slot. The first that the backward comes to takes the gradients that ended here before."""
        anchor, leaf = _Anchor.apply(self.slots[slot]), self.anchors.get(slot)

        def add_what_ended_here(grad: torch.Tensor) -> torch.Tensor:
            before, leaf.grad = leaf.grad, None
            return grad if before is None else before.add_(grad)

        if leaf is not None:
            anchor.register_hook(add_what_ended_here)
        return anchor

    @contextmanager
    def leading_on(self) -> Iterator[None]:
        """Within it, the gradients of reads go on through the prefix, whose backward is to be that of the reads."""
        leaves = self.anchors
        self.anchors = {slot: self._anchor(slot) for slot, x in self.slots.items() if x.requires_grad}
        try:
            yield
        finally:
            self.anchors = leaves

    def end_here(self) -> None:
        """From here on, the gradients of reads end here, and add up."""
        self.anchors = {
            slot: _without_storage(x).requires_grad_() for slot, x in self.slots.items() if x.requires_grad
        }

    def backward(self) -> None:
        """Backward of the prefix, from the gradients that ended here."""
        leaves, self.anchors = self.anchors, {}
        slots = [slot for slot, leaf in leaves.items() if leaf.grad is not None]
        gradients = [leaves.pop(slot).grad.to(self.slots[slot].dtype) for slot in slots]
        if slots:
            torch.autograd.backward([self.slots[slot] for slot in slots], gradients)

    def read(self, slot: tuple, num_rows: int = 1) -> torch.Tensor:
        """What is in a slot, once for each of so many rows."""
        x = self.slots[slot]
        shape = (num_rows, *x.shape[1:]) if num_rows > 1 else x.shape
        if slot not in self.anchors:
            return x.expand(shape)
        return _Read.apply(x.detach().expand(shape), self.anchors[slot].expand(shape))

    def read_attention(self, layer_idx: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each prefix of its path."""
        layer_idx = self.sources[layer_idx]
        return [(prefix.read((layer_idx, KEY)), prefix.read((layer_idx, VALUE))) for prefix in self.path]

    def read_router(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """What was written of the router, if anything was."""
        return None if self._experts is None else (self._experts[0], self.read((None, ROUTER)), self._experts[1])

    def take_attention(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, which are not kept any longer."""
        del self._keys[layer_idx]
        return self.slots.pop((layer_idx, KEY)), self.slots.pop((layer_idx, VALUE))

    def states_of(self, layer_idx: int) -> list[tuple]:
        """Slots of the states of a layer."""
        return [slot for slot in self.slots if slot[0] == layer_idx and len(slot) == 3]

    def layers(self) -> dict[int, list[torch.Tensor]]:
        """What each layer left."""
        layers: dict[int, list[torch.Tensor]] = {}
        for slot, x in self.slots.items():
            if slot[0] is not None:
                layers.setdefault(slot[0], []).append(x)
        return layers

    def missing_layers(self, config: PretrainedConfig) -> list[int]:
        """Indices of the layers that did not leave what they should, or left what they should not."""
        attending, with_state = layers_by_kind(config)
        recorded = {slot[0] for slot in self.slots if len(slot) == 3}
        # Attention that several layers share may not know the layer that it is in
        return sorted((attending ^ self.sources.keys()) | (with_state ^ recorded), key=str)
