"""
Prefix sharing: the one way into attention. How attention and masks see what goes through a model, a prompt or what is
behind a prefix, whatever implementation the model was loaded with.

Shape suffixes: S prefix tokens, T tokens of a packed pass, D head size.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sliding_window_causal_mask_function

from .attention import is_plain, kernels_take, shared_prefix_attention
from .kernels import Runs
from .nodes import Node, Path
from .states import States, check_graph

# Softmax attention of transformers, whatever names it is registered by: those of kernels of the hub, too
_SOFTMAX_ATTENTION = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)

# Completions that attend together save copies of the prefix, at the cost of scores between tokens of different
# completions, which the mask throws away. Those stay below a quarter of the scores with the prefix.
_MAX_BLOCK_PER_PREFIX = 1 / 4


@dataclass(frozen=True)
class Attention:
    """
    Attention of a model as it was loaded, and that in which its modeling file spells it out, which takes any mask and
    all that a model adds to a softmax of scaled scores.
    """

    attend: Callable
    eager: Callable

    def masked(self, module, query, key, value, allowed: torch.Tensor | None, **kwargs) -> torch.Tensor:
        """
        Attention of queries to keys that a row's queries share, `(B, Q, H, D)`. `allowed` is a boolean mask; flash
        kernels take none. The keys of grouped-query attention are not expanded unless the model's own way is needed.
        """
        if not is_plain(kwargs) or kwargs.get("s_aux") is not None:
            mask = None if allowed is None else _added(allowed, query.dtype)
            return self.eager(module, query, key, value, mask, **kwargs)[0]
        # `sdpa` would repeat the keys and values for each query head. Query heads that read the same key head become
        # more queries of that head instead.
        num_heads, num_key_value_heads, num_queries = query.shape[1], key.shape[1], query.shape[2]
        groups = num_heads // num_key_value_heads
        output = nn.functional.scaled_dot_product_attention(
            query.reshape(-1, num_key_value_heads, groups * num_queries, query.shape[-1]),
            key,
            value,
            attn_mask=None if allowed is None else allowed.repeat(1, 1, groups, 1),
            scale=kwargs.get("scaling"),
        )
        return output.reshape(-1, num_heads, num_queries, value.shape[-1]).transpose(1, 2).contiguous()


def _added(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def layer_window(own: Attention, module: nn.Module, windows: set[int | None], arguments: dict) -> int | None:
    """
    Number of tokens that a layer sees, the attending one included, or None if it sees all that is behind it. Flash
    kernels go by the `arguments` of a layer's attention, all others by its mask: `windows` are those of the causal
    masks that the model asked for. A few models tell the two differently, so it depends on the implementation.
    """
    if own.attend is flash_attention_forward:
        return arguments.get("sliding_window")
    if len(windows) == 1:
        return next(iter(windows))
    config = module.config
    window = config.sliding_window if config.layer_types[module.layer_idx] == "sliding_attention" else None
    if window not in windows or arguments.get("sliding_window", window) != window:
        raise RuntimeError(
            f"layer {module.layer_idx} has a window of {window} tokens by its type, its attention "
            f"{arguments.get('sliding_window')}, and the masks of the model {sorted(windows, key=str)}."
        )
    return window


class RecordPrefix:
    """
    Attention context of the prompt pass: attend as usual, and keep the keys and values. Where a model spells attention
    out (`eager`), which holds the scores of all pairs of tokens, a kernel attends if it can.

    Gradient checkpointing keeps it, inside the graph that the keys and values hold, and calls layers with it once
    more. So it lets go of the prefix when the pass ends: else neither is ever freed if no backward follows.
    """

    def __init__(self, prefix: Node):
        self.prefix: Node | None = prefix
        self.has_tokens = len(prefix.positions) > 0
        self.without_graph: set[int] = set()  # layers that ran so
        self.windows: set[int | None] = set()  # of the causal masks that an `eager` model asked for
        self.masks: dict[tuple, torch.Tensor] = {}  # those that layers needed, by window and device

    def on(self, device: torch.device) -> "RecordPrefix":
        """For layers on any device."""
        return self

    @property
    def states(self) -> States:
        return States(record=self, has_tokens=self.has_tokens)

    def close(self) -> None:
        self.prefix = None

    def write(self, slot: tuple, x: torch.Tensor) -> None:
        if self.prefix is not None:
            self.prefix.write(slot, x)

    def write_attention(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.prefix is not None:
            self.prefix.write_attention(layer_idx, key, value)

    def mask(self, mask_function, local_size, allow_is_causal_skip, **kwargs) -> torch.Tensor | None:
        """Mask of layers as an `eager` model asks for it. None where only the future is hidden, or a window ends."""
        if mask_function is causal_mask_function or (local_size is not None and allow_is_causal_skip):
            self.windows.add(local_size)
            return None
        kwargs |= {"local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip}
        return eager_mask(mask_function=mask_function, **kwargs)

    def attend(self, own: "Attention", module, query, key, value, attention_mask, **kwargs):
        self.write_attention(module.layer_idx, key, value)
        if attention_mask is not None or not self.windows:
            return own.attend(module, query, key, value, attention_mask, **kwargs)
        window = layer_window(own, module, self.windows, kwargs)
        if is_plain(kwargs) and kernels_take(key, value):
            runs, sink = Runs.of([key.shape[2]], key.device), kwargs.get("s_aux")
            return shared_prefix_attention(query, key, value, [], runs, kwargs.get("scaling"), sink, window), None
        return own.attend(module, query, key, value, self._causal_mask(window, query), **kwargs)

    def _causal_mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        if (window, query.device) not in self.masks:
            place = torch.arange(query.shape[2], device=query.device)
            back = place[:, None] - place
            seen = back >= 0 if window is None else (back >= 0) & (back < window)
            self.masks[window, query.device] = _added(seen[None, None], query.dtype)
        return self.masks[window, query.device]


def _size_in_window(prefix: Path, window: int | None) -> int:
    """Number of prefix tokens that the first token behind it sees."""
    return prefix.size if window is None else min(prefix.size, window - 1)


class ReadPrefix:
    """
    Attention context of a pass behind a prefix. Completions are packed in one row after one another: each attends to
    the prefix and to itself. Without a mask if the layer's is a causal one, with a window or without, see
    [`SharedPrefixAttention`]. A prompt behind what other prompts begin with, too, is a row of its own, and leaves its
    keys and values as `record` says.

    With a mask, neighboring completions attend together, behind one copy of the prefix, as long as they are short
    beside it. A completion that is long beside the prefix attends by itself. Layers with a window read the end of the
    prefix only.
    """

    def __init__(
        self,
        prefix: Path,
        positions: torch.Tensor,  # (T,)
        rows: torch.Tensor,  # (T,), completion that each token belongs to
        columns: torch.Tensor,  # (T,), its place there
        lengths: list[int],  # of the completions
        window: int | None = None,  # of layers that have one, in tokens, the attending one included
        record: RecordPrefix | None = None,
    ):
        self.prefix, self.positions, self.rows, self.window, self.record = prefix, positions, rows, window, record
        self.blocks = [0]  # number of tokens of completions that attend together
        prefix_size = _size_in_window(prefix, window)  # where there are windows, hardly any other layer has a mask
        for length in lengths:
            if self.blocks[-1] + length > prefix_size * _MAX_BLOCK_PER_PREFIX and self.blocks[-1] > 0:
                self.blocks.append(0)
            self.blocks[-1] += length
        self.runs = Runs.of(lengths, rows.device)
        self.states = States(prefix, record, rows=rows, columns=columns, lengths=lengths)
        self.without_graph: set[int] = set()  # layers that ran so
        self.windows: set[int | None] = set()  # of the causal masks that the model asked for
        self.masks: dict[int | None, torch.Tensor] = {}  # those that layers needed, by window
        self.copies: dict[torch.device, ReadPrefix] = {}  # for layers on other devices

    def on(self, device: torch.device) -> "ReadPrefix":
        """For layers on a device, where a model is spread over several."""
        if device == self.positions.device:
            return self
        if device not in self.copies:
            there = self.copies[device] = copy.copy(self)
            there.positions, there.rows, there.masks = self.positions.to(device), self.rows.to(device), {}
            there.runs, there.states = Runs.of(self.runs.lengths, device), self.states.on(device)
        return self.copies[device]

    def prefix_size(self, has_window: bool) -> int:
        """Number of prefix tokens that a layer reads: with a window, those that the first of a completion sees."""
        return _size_in_window(self.prefix, self.window if has_window else None)

    def allowed(self, mask_function, has_window: bool = False) -> torch.Tensor:
        """
        Boolean mask of shape `(1, 1, T, prefix_size + longest block)`, from the model's own mask function (causal,
        sliding window). Behind the prefix, the columns are the tokens of the block.
        """
        device = self.positions.device
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        prefix_size = self.prefix_size(has_window)
        prefix_positions = self.prefix.path_positions.to(device)[None, self.prefix.size - prefix_size :]
        # Filled block by block: mask functions make several tensors of the size of what they are asked for
        allowed = torch.zeros(len(self.rows), prefix_size + max(self.blocks), dtype=torch.bool, device=device)
        of_blocks = (x.split(self.blocks) for x in (self.positions, self.rows, allowed))
        for queries, rows, block in zip(*of_blocks, strict=True):
            block[:, :prefix_size] = mask_function(zero, zero, queries[:, None], prefix_positions)
            own = mask_function(zero, zero, queries[:, None], queries[None, :])
            block[:, prefix_size : prefix_size + len(rows)] = own & (rows[:, None] == rows[None, :])
        return allowed[None, None]

    def mask(self, mask_function, local_size, allow_is_causal_skip, use_vmap, **kwargs) -> torch.Tensor | None:
        """Mask of layers as a model asks for it. None where a token sees all that is behind it, or a window."""
        if use_vmap:
            raise RuntimeError("The model uses a custom attention mask, which `prefix_sharing=True` does not support.")
        has_window = local_size is not None and local_size == self.window
        if mask_function is causal_mask_function or (has_window and allow_is_causal_skip):
            self.windows.add(local_size)
            return None
        return self.allowed(mask_function, has_window)

    def attend(self, own: Attention, module, query, key, value, attention_mask, **kwargs):
        if not self._may_have_made(attention_mask):
            raise RuntimeError(
                f"{type(module).__name__} did not receive the mask of the shared prefix, so its attention cannot be "
                "trusted. Set `prefix_sharing=False`."
            )
        if self.record is not None:
            self.record.write_attention(module.layer_idx, key, value)
        prefix = self.prefix.read_attention(module.layer_idx)
        if attention_mask is None:
            window = layer_window(own, module, self.windows, kwargs)
            if window is not None and self.prefix.size + max(self.runs.lengths) <= window:
                window = None  # it holds all that is behind a token
            if is_plain(kwargs) and kernels_take(key, value):
                scale, sink = kwargs.get("scaling"), kwargs.get("s_aux")
                return shared_prefix_attention(query, key, value, prefix, self.runs, scale, sink, window), None
            attention_mask = self._causal_mask(window)
        return self._attend_with_mask(own, module, query, key, value, prefix, attention_mask, **kwargs), None

    def _may_have_made(self, mask: torch.Tensor | None) -> bool:
        if mask is None:
            return len(self.windows) > 0
        sizes = {self.prefix_size(has_window) for has_window in (False, self.window is not None)}
        return mask.shape[2:] in [(len(self.rows), size + max(self.blocks)) for size in sizes]

    def _causal_mask(self, window: int | None) -> torch.Tensor:
        if window not in self.masks:  # which layers share
            function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
            self.masks[window] = self.allowed(function, has_window=window is not None)
        return self.masks[window]

    def _attend_with_mask(self, own, module, query, key, value, prefix, allowed, **kwargs):
        prefix_size = allowed.shape[3] - max(self.blocks)
        prefix_key, prefix_value = (
            (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])[:, :, self.prefix.size - prefix_size :]
            for parts in zip(*prefix, strict=True)
        )
        outputs = []
        per_block = (x.split(self.blocks, dim=2) for x in (query, key, value, allowed))
        for block_query, block_key, block_value, seen in zip(*per_block, strict=True):
            seen = seen[..., : prefix_size + block_key.shape[2]]
            # A mask does not hide what is not finite from other completions, because 0 * nan is nan
            finite = (block_key.isfinite().all(-1) & block_value.isfinite().all(-1)).all(1)[:, None, :, None]
            block_key = torch.cat([prefix_key, block_key.where(finite, 0)], dim=2)
            block_value = torch.cat([prefix_value, block_value.where(finite, 0)], dim=2)
            output = own.masked(module, block_query, block_key, block_value, seen, **kwargs)
            sees_no_number = (seen[..., prefix_size:] & ~finite.mT).any(-1)  # (1, 1, block)
            outputs.append(output.masked_fill(sees_no_number[..., None].transpose(1, 2), torch.nan))
        return torch.cat(outputs, dim=1)


# What a model is running: a pass of completions, whose masks it builds, or the cache that `generate` decodes with. And
# the configs of its text part: towers have others, and go on as they are. The attention of a pass gets its context as
# a keyword argument instead, which gradient checkpointing replays
_running: ContextVar[tuple[Any, list[PretrainedConfig]]] = ContextVar("running", default=(None, []))
_num_running = 0  # in all threads: what a compiled model can ask, which must not ask a context variable

# On modules: they attend to a prefix where they are called with one. What a text part is called with may reach towers.
MARK = "_attends_to_prefix"


@contextmanager
def running(context, configs: list[PretrainedConfig]) -> Iterator[None]:
    """
    Have the masks of every forward with these configs be those of `context`, a pass of completions, or its attention,
    too, go through `context.attend` of a [`SharedPrefixCache`].
    """
    global _num_running
    outer = _running.get()
    try:
        _num_running += 1
        _running.set((context, configs))
        yield
    finally:
        _running.set(outer)
        _num_running -= 1


def is_softmax_attention(implementation: str) -> bool:
    """Whether attention of this name is known to be a softmax of scaled scores, with what models may add to it."""
    return implementation == "eager" or AttentionInterface().get(implementation) in _SOFTMAX_ATTENTION


@torch.compiler.disable
def _context_with(config: PretrainedConfig | None):
    context, configs = _running.get()
    return context if any(config is x for x in configs) else None


def _attention(own: Attention, module: nn.Module, *args, shared_prefix=None, **kwargs):
    if shared_prefix is None and not _num_running or MARK not in vars(module):
        return own.attend(module, *args, **kwargs)
    return _attend(own, module, shared_prefix, *args, **kwargs)


@torch.compiler.disable
def _attend(own: Attention, module: nn.Module, shared_prefix, *args, **kwargs):
    context = _context_with(module.config) if shared_prefix is None else shared_prefix
    if context is None or shared_prefix is None and isinstance(context, RecordPrefix) and not context.windows:
        return own.attend(module, *args, **kwargs)
    if isinstance(context, ReadPrefix | RecordPrefix):
        if shared_prefix is None:
            raise RuntimeError(
                f"{type(module).__name__} was called in a pass of its model without the prefix of the pass. Set "
                "`prefix_sharing=False`."
            )
        check_graph(context.without_graph, module.layer_idx)
        context = context.on(args[0].device)
    if own.attend is sdpa_attention_forward:
        kwargs.pop("s_aux", None)  # it does not read sinks
    return context.attend(own, module, *args, **kwargs)


def _mask(own: Callable, *, config: PretrainedConfig | None = None, **kwargs):
    context = _context_with(config)
    if context is None or (isinstance(context, RecordPrefix) and own is not eager_mask):
        return own(config=config, **kwargs)
    return context.mask(**{"local_size": None, "use_vmap": False, "allow_is_causal_skip": True, **kwargs})


# The one way in. All models ask these two for attention and masks, by the name of their implementation, whoever
# registered it and when. A call without a prefix goes on as it came.
_own_attention, _own_mask = AttentionInterface.get_interface, AttentionMaskInterface.__getitem__


def _get_attention(self: AttentionInterface, implementation: str, default: Callable) -> Callable:
    return functools.partial(_attention, Attention(_own_attention(self, implementation, default), default))


def _get_mask(self: AttentionMaskInterface, implementation: str) -> Callable:
    own = _own_mask(self, implementation)
    return functools.partial(_mask, own) if _num_running else own


AttentionInterface.get_interface = _get_attention
AttentionMaskInterface.__getitem__ = _get_mask
