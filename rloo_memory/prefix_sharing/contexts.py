"""
Prefix sharing: how attention and masks see what goes through a model, a prompt or what is behind a prefix.

Shape suffixes: S prefix tokens, T tokens of a packed pass, D head size.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import Runs, is_plain, kernels_take, shared_prefix_attention
from .nodes import KEY, VALUE, Node, Path
from .states import ReadStates, RecordStates


# Attention implementations that take an arbitrary mask, which is what lets packed completions see one prefix
BASE_IMPLEMENTATIONS = ("sdpa", "eager")
IMPLEMENTATION_PREFIX = f"{__package__}."  # two copies of this package do not replace what the other registers

# Completions that attend together save copies of the prefix, at the cost of scores between tokens of different
# completions, which the mask throws away. Those stay below a quarter of the scores with the prefix.
_MAX_BLOCK_PER_PREFIX = 1 / 4


class RecordPrefix:
    """
    Attention context of the prompt pass: attend as usual, and keep the keys and values.

    Gradient checkpointing keeps it, inside the graph that the keys and values hold, and calls layers with it once more.
    So it lets go of the prefix when the pass ends: else neither is ever freed if no backward follows.
    """

    def __init__(self, prefix: Node):
        self.prefix = prefix
        self.has_tokens = len(prefix.positions) > 0

    @property
    def states(self) -> RecordStates:
        return RecordStates(self, self.has_tokens)

    def close(self) -> None:
        self.prefix = None

    def write(self, slot: tuple, x: torch.Tensor) -> None:
        if self.prefix is not None:
            self.prefix.write(slot, x)

    def write_attention(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.prefix is not None:
            self.prefix.write_attention(layer_idx, key, value)

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        self.write_attention(module.layer_idx, key, value)
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


def _size_in_window(prefix: Path, window: int | None) -> int:
    """Number of prefix tokens that the first token behind it sees."""
    return prefix.size if window is None else min(prefix.size, window - 1)


@dataclass(frozen=True)
class ReadPrefix:
    """
    Attention context of a pass behind a prefix. Completions are packed in one row after one another: each attends to the
    prefix and to itself. Without a mask if the layer's is a plain causal one, see [`SharedPrefixAttention`]. A prompt
    behind what other prompts begin with, too, is a row of its own, and leaves its keys and values as `record` says.

    With a mask, neighboring completions attend together, behind one copy of the prefix, as long as they are short
    beside it. A completion that is long beside the prefix attends by itself. Layers with a window read the end of the
    prefix only.
    """

    prefix: Path
    positions: torch.Tensor  # (T,)
    rows: torch.Tensor  # (T,), completion that each token belongs to
    window: int | None  # of layers that have one, in tokens, the attending one included
    runs: Runs  # of the completions
    blocks: list[int]  # number of tokens of completions that attend together
    states: ReadStates  # what layers with a state start from
    record: RecordPrefix | None = None

    @classmethod
    def of(
        cls,
        prefix: Path,
        positions: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        lengths: list[int],
        window: int | None = None,
        record: RecordPrefix | None = None,
    ) -> "ReadPrefix":
        """Context of completions of these `lengths`, of which each token is in a row and column."""
        blocks = [0]
        prefix_size = _size_in_window(prefix, window)  # where there are windows, hardly any other layer has a mask
        for length in lengths:
            if blocks[-1] + length > prefix_size * _MAX_BLOCK_PER_PREFIX and blocks[-1] > 0:
                blocks.append(0)
            blocks[-1] += length
        runs = Runs.of(lengths, rows.device)
        states = ReadStates.of(prefix, rows, columns, lengths, record)
        return cls(prefix, positions, rows, window, runs, blocks, states, record)

    def prefix_size(self, has_window: bool) -> int:
        """Number of prefix tokens that a layer reads: with a window, those that the first of a completion sees."""
        return _size_in_window(self.prefix, self.window if has_window else None)

    @property
    def fits_window(self) -> bool:
        """Whether all tokens of a completion see all of the prefix in their windows."""
        return self.prefix.size + max(self.runs.lengths) <= self.window

    def allowed(self, mask_function, has_window: bool = False) -> torch.Tensor:
        """
        Boolean mask of shape `(1, 1, T, prefix_size + longest block)`, from the model's own mask function (causal,
        sliding window). Behind the prefix, the columns are the tokens of the block.
        """
        device = self.positions.device
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        prefix_size = self.prefix_size(has_window)
        prefix_positions = self.prefix.path_positions[None, self.prefix.size - prefix_size :]
        # Filled block by block: mask functions make several tensors of the size of what they are asked for
        allowed = torch.zeros(len(self.rows), prefix_size + max(self.blocks), dtype=torch.bool, device=device)
        of_blocks = (x.split(self.blocks) for x in (self.positions, self.rows, allowed))
        for queries, rows, block in zip(*of_blocks, strict=True):
            block[:, :prefix_size] = mask_function(zero, zero, queries[:, None], prefix_positions)
            own = mask_function(zero, zero, queries[:, None], queries[None, :])
            block[:, prefix_size : prefix_size + len(rows)] = own & (rows[:, None] == rows[None, :])
        return allowed[None, None]

    @property
    def no_mask(self) -> torch.Tensor:
        """What stands for the mask of a plain causal layer: no column, but a row for each token."""
        return torch.empty(1, 1, len(self.rows), 0, dtype=torch.bool, device=self.rows.device)

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        sizes = {self.prefix_size(has_window) for has_window in (False, self.window is not None)}
        shapes = [(len(self.rows), width) for width in (0, *(size + max(self.blocks) for size in sizes))]
        if attention_mask is None or attention_mask.shape[2:] not in shapes:
            raise RuntimeError(
                f"{type(module).__name__} did not receive the mask of the shared prefix, so its attention cannot be "
                "trusted. Set `prefix_sharing=False`."
            )
        if self.record is not None:
            self.record.write_attention(module.layer_idx, key, value)
        prefix = self.prefix.read_attention(module.layer_idx)
        if attention_mask.shape[3] == 0:
            if is_plain(kwargs):
                return shared_prefix_attention(query, key, value, prefix, self.runs, kwargs.get("scaling")), None
            attention_mask = self.allowed(causal_mask_function)
        prefix_size = attention_mask.shape[3] - max(self.blocks)
        prefix_key, prefix_value = (
            (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])[:, :, self.prefix.size - prefix_size :]
            for parts in zip(*prefix, strict=True)
        )
        outputs = []
        per_block = (x.split(self.blocks, dim=2) for x in (query, key, value, attention_mask))
        for block_query, block_key, block_value, mask in zip(*per_block, strict=True):
            mask = mask[..., : prefix_size + block_key.shape[2]]
            # A mask does not hide what is not finite from other completions, because 0 * nan is nan
            finite = (block_key.isfinite().all(-1) & block_value.isfinite().all(-1)).all(1)[:, None, :, None]
            block_key = torch.cat([prefix_key, block_key.where(finite, 0)], dim=2)
            block_value = torch.cat([prefix_value, block_value.where(finite, 0)], dim=2)
            output, _ = masked_attention(base, module, block_query, block_key, block_value, mask, **kwargs)
            seen = mask[..., prefix_size:] if mask.dtype == torch.bool else mask[..., prefix_size:] == 0
            sees_no_number = (seen & ~finite.mT).any(-1)[..., None].transpose(1, 2)  # (1, block, 1, 1)
            outputs.append(output.masked_fill(sees_no_number, torch.nan))
        return torch.cat(outputs, dim=1), None


@contextmanager
def routed(configs: list[PretrainedConfig]) -> Iterator[None]:
    """
    Have attention and masks of what has these configs go to the functions below. The rest of the time, the configs name
    the model's own implementation, which models and engines ask for.
    """
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, own in before:
            config._attn_implementation_internal = IMPLEMENTATION_PREFIX + own.removeprefix(IMPLEMENTATION_PREFIX)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


# What a model is running: a pass of completions, whose masks it builds, or the cache that `generate` decodes with. The
# attention of a pass gets its context as a keyword argument instead, which gradient checkpointing replays.
_running: ContextVar = ContextVar("running", default=None)


@contextmanager
def running(context, configs: list[PretrainedConfig]) -> Iterator[None]:
    """
    Have the masks of every forward with these configs be those of `context`, a pass of completions, or its attention,
    too, go through `context.attend` of a [`SharedPrefixCache`].
    """
    outer = _running.get()
    try:
        _running.set(context)
        with routed(configs):
            yield
    finally:
        _running.set(outer)


def _base_attention(base: str, module: nn.Module):
    # Eager attention is not in the interface: each modeling file defines its own
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def masked_attention(base, module, query, key, value, attention_mask, **kwargs):
    """
    Attention of queries to keys that a row's queries share, without expanding the keys of grouped-query attention.
    """
    num_heads, num_key_value_heads = query.shape[1], key.shape[1]
    if base != "sdpa" or num_heads == num_key_value_heads:
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)
    # `sdpa` repeats the keys and values for each query head when there is a mask. Query heads that read the same key
    # head become more queries of that head instead.
    groups = num_heads // num_key_value_heads
    num_queries = query.shape[2]
    attn_output = nn.functional.scaled_dot_product_attention(
        query.reshape(-1, num_key_value_heads, groups * num_queries, query.shape[-1]),
        key,
        value,
        attn_mask=None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1),
        scale=kwargs.get("scaling"),
    )
    attn_output = attn_output.reshape(-1, num_heads, num_queries, value.shape[-1])
    return attn_output.transpose(1, 2).contiguous(), None


def _attention(base, module, query, key, value, attention_mask, shared_prefix=None, **kwargs):
    context = _running.get() if shared_prefix is None else shared_prefix
    if context is None:
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)
    if shared_prefix is None and isinstance(context, ReadPrefix):
        raise RuntimeError(
            f"{type(module).__name__} was called in a pass of its model without the prefix of the pass. Set "
            "`prefix_sharing=False`."
        )
    return context.attend(base, module, query, key, value, attention_mask, **kwargs)


def _mask(base, *, mask_function, use_vmap=False, dtype=torch.float32, **kwargs):
    current_pass = _running.get()
    if not isinstance(current_pass, ReadPrefix):
        if current_pass is not None and kwargs.get("allow_is_causal_skip", True):
            # A decoded token sees all that is behind it, or a window: the shape of an empty mask says how large
            local_size = kwargs.get("local_size")
            if local_size is None or kwargs["kv_length"] <= local_size:
                return None
            return torch.empty(1, 1, 0, local_size, dtype=torch.bool, device=kwargs["device"])
        return ALL_MASK_ATTENTION_FUNCTIONS[base](
            mask_function=mask_function, use_vmap=use_vmap, dtype=dtype, **kwargs
        )
    if use_vmap:
        raise RuntimeError("The model uses a custom attention mask, which `prefix_sharing=True` does not support.")
    local_size = kwargs.get("local_size")
    has_window = local_size is not None and local_size == current_pass.window
    is_causal = mask_function is causal_mask_function
    if has_window and kwargs.get("allow_is_causal_skip", True):  # nothing but the window hides what is behind a token
        is_causal = current_pass.fits_window
    if base == "sdpa" and is_causal:
        slots = current_pass.prefix.slots
        if all(kernels_take(slots[layer, KEY], slots[layer, VALUE]) for layer in current_pass.prefix.sources.values()):
            return current_pass.no_mask
    return as_base_mask(base, current_pass.allowed(mask_function, has_window), dtype)


def as_base_mask(base: str, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if base == "sdpa":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


for _base in BASE_IMPLEMENTATIONS:
    AttentionInterface.register(IMPLEMENTATION_PREFIX + _base, functools.partial(_attention, _base))
    AttentionMaskInterface.register(IMPLEMENTATION_PREFIX + _base, functools.partial(_mask, _base))
