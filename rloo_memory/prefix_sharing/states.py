"""
Prefix sharing for layers with a state: the completions of a prompt go on from the states that it leaves in
convolutions and recurrences.

A mixer (Gated DeltaNet, Mamba-2, Kimi delta attention, short convolution) asks its cache for the state to start from
and hands the new one back. In a pass, an object that writes nothing in place takes the cache's place, at the mixer's
own forward: gradient checkpointing runs that again, and keeps a cache from the layers around it.

A mixer cannot tell packed completions apart, so they lie in rows around it, one row each. Rows are padded on the
right, which no token of a causal mixer can see. Kernels that take `cu_seqlens` with an initial state for each sequence
would save that padding, but the implementations in PyTorch know nothing else. The model's forward runs unchanged, with
the kernels that it finds.

Shape suffixes: N rows that share a prompt, L tokens of the longest row, T tokens of a packed pass, H hidden size, D
channels of a convolution, K its width.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from .probe import can_be_tried

if TYPE_CHECKING:
    from .nodes import Node, Path
    from .routing import RecordPrefix

# What a layer of each type keeps of a sequence, as in transformers' caches
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "hybrid"}
_STATE_TYPES = {"linear_attention", "conv", "hybrid"}
SUPPORTED_LAYER_TYPES = _ATTENTION_TYPES | _STATE_TYPES | {"moe", "mlp"}

# Names that models, since transformers 5.24 all by the first, and mixers have for their cache
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")


def layers_by_kind(config: PretrainedConfig) -> tuple[set[int], set[int]]:
    """Indices of the layers that attend and of those that have a state. A layer can do both, or neither."""
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending, with_state = (
        {layer_idx for layer_idx, layer_type in enumerate(layer_types) if layer_type in types}
        for types in (_ATTENTION_TYPES, _STATE_TYPES)
    )
    return attending, with_state


@dataclass(frozen=True)
class States:
    """
    Takes the place of a mixer's cache in a pass: each row starts from the states of the prefix, or from nothing. Those
    at the end of a single row, which is not padded, are written to `record`.
    """

    prefix: "Path | Node | None" = None
    record: "RecordPrefix | Node | None" = None
    has_tokens: bool = True  # else what goes through is no part of a prompt, and its completions start from zero
    rows: torch.Tensor | None = None  # (T,), row that each token belongs to. None: there is one row
    columns: torch.Tensor | None = None  # (T,), its place there
    lengths: Sequence[int] = (0,)  # of the rows

    @property
    def shape(self) -> tuple[int, int]:
        """N, L. With a single token and a state, mixers take a path for decoding that writes in place."""
        return len(self.lengths), max(2, *self.lengths)

    def on(self, device: torch.device) -> "States":
        if self.rows is None or self.columns is None:
            return self
        return replace(self, rows=self.rows.to(device), columns=self.columns.to(device))

    def _read(self, slot: tuple) -> torch.Tensor | None:
        if self.prefix is None or slot not in self.prefix.slots:  # a short convolution has no recurrent state
            return None
        return self.prefix.read(slot, self.shape[0])

    def _write(self, slot: tuple, columns: torch.Tensor, size: int) -> None:
        if self.record is not None:
            kept = columns if self.has_tokens else columns[..., :0]
            # The last columns, in a copy: a slice would keep all of them
            self.record.write(slot, nn.functional.pad(kept, (size - kept.shape[-1], 0)))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._read((layer_idx, "recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        before = self.get_conv_state(layer_idx, state_idx)
        columns = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        size = (conv_kernel_size or conv_states.shape[-1]) if before is None else before.shape[-1]
        self._write((layer_idx, "conv", state_idx), columns, size)
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs
    ) -> torch.Tensor:
        self._write((layer_idx, "recurrent", state_idx), recurrent_states, recurrent_states.shape[-1])
        return recurrent_states

    def to_rows(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return hidden_states
        rows = hidden_states.new_zeros(*self.shape, hidden_states.shape[-1])
        return rows.index_put((self.rows, self.columns), hidden_states[0])

    def pack(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.rows is None else output[self.rows, self.columns][None]


def find_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that take the states of transformers' cache: those with a convolution of their own and a cache."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children()) and cache_argument(module)
    ]


def cache_argument(module: nn.Module) -> str:
    """The name that a module has for its cache. Empty: it takes none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def check_graph(without_graph: set[int], layer_idx: int) -> None:
    """
    Raise if a layer runs with a graph which ran without one in the same pass: so does reentrant checkpointing, whoever
    asks for it, and what a prompt has left without a graph gets no gradient.
    """
    if not torch.is_grad_enabled():
        without_graph.add(layer_idx)
    elif layer_idx in without_graph:
        raise RuntimeError(
            f"Layer {layer_idx} is in reentrant gradient checkpointing, which cuts the gradient of what is computed "
            "once for several completions. Checkpoint it with `use_reentrant=False`."
        )


def _enter(name: str, mixer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    # Not for the kernels, to which mixers pass on what they do not know
    context = kwargs.pop("shared_prefix", None)
    if context is not None:
        check_graph(context.without_graph, mixer.layer_idx)
        hidden_states = args[0] if args else kwargs.pop("hidden_states")
        states = context.on(hidden_states.device).states
        args, kwargs[name] = (states.to_rows(hidden_states), *args[1:]), states
    return args, kwargs


def _leave(name: str, mixer: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
    states = kwargs.get(name)
    return states.pack(output) if isinstance(states, States) else output


def unshare_states(mixer: nn.Module) -> None:
    """Remove the hooks of [`share_states`]. A copy of a mixer has copies of them, which would pack its rows twice."""
    before = mixer._forward_pre_hooks, mixer._forward_pre_hooks_with_kwargs
    behind = mixer._forward_hooks, mixer._forward_hooks_with_kwargs
    for hooks, with_kwargs in (before, behind):
        for number in [number for number, hook in hooks.items() if getattr(hook, "func", None) in (_enter, _leave)]:
            del hooks[number], with_kwargs[number]


def share_states(mixers: list[nn.Module]) -> None:
    """Have mixers start from the states of a shared prefix where they are called with one, and leave them there."""
    for mixer in mixers:
        unshare_states(mixer)
        name = cache_argument(mixer)
        mixer.register_forward_pre_hook(functools.partial(_enter, name), with_kwargs=True)
        mixer.register_forward_hook(functools.partial(_leave, name), with_kwargs=True)


@torch.no_grad()
def ignores_state(mixer: nn.Module, prefix: "Node", hidden_size: int) -> bool:
    """
    Whether a mixer asks for a state and goes on without it, as PyTorch's scan of Mamba-1 does. A comparison with whole
    sequences does not have to show that: a layer can forget so fast that half precision rounds the rest away. `prefix`
    is one of two tokens, without states.
    """
    weight = next(child.weight for child in mixer.children() if isinstance(child, nn.Conv1d))  # never quantized
    if not can_be_tried(mixer):
        return False
    # No random numbers, which training would miss
    hidden_states = torch.linspace(-1, 1, 2 * hidden_size, dtype=weight.dtype, device=weight.device).view(1, 2, -1)
    name = cache_argument(mixer)
    mixer(hidden_states, **{name: States(record=prefix)})
    columns = torch.arange(2, device=weight.device)
    read = States(prefix, rows=torch.zeros_like(columns), columns=columns, lengths=[2])
    states = dict(prefix.slots)
    for kind in {slot[1] for slot in states}:
        outputs = []
        for fill in (0.0, 1e4):
            for slot, state in states.items():
                prefix.slots[slot] = torch.full_like(state, fill) if slot[1] == kind else state
            outputs.append(mixer(hidden_states, **{name: read}))
        if torch.equal(*outputs):
            return True
    return False


def fork_states(
    layer: LinearAttentionLayer, layer_idx: int, prefixes: list["Path"], groups: list[torch.Tensor]
) -> None:
    """Give each row of a cache layer, which has no states yet, a copy of those that the prompt of its group left."""
    update = {"conv": layer.update_conv_state, "recurrent": layer.update_recurrent_state}
    row_order = torch.cat(groups).argsort()
    for slot in prefixes[0].last.states_of(layer_idx):
        states = [prefix.read(slot, len(rows)) for prefix, rows in zip(prefixes, groups, strict=True)]
        update[slot[1]](torch.cat(states)[row_order.to(states[0].device)], state_idx=slot[2])
