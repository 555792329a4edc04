# Copyright 2020-2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

"""
Prefix sharing: the completions of a prompt attend to keys and values that are computed once for all of them.

The shared prefix is the prompt without its last token, and every completion is preceded by that last token. So the
prompt pass only has to leave keys and values behind, and the first completion token is scored like any other.

A pass is what goes through the model together: a prompt, some completions of a prompt, or, where nothing is shared, some
whole rows. The number of completions or of tokens of a pass bounds the memory of activations.

Shape suffixes: B rows, P prompt columns, C completion columns, S prefix tokens, T tokens of a packed pass, N rows that
share a prompt, H hidden size, D head size.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from accelerate.utils import is_peft_model
from packaging.version import Version
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


if Version(torch.__version__) >= Version("2.6.0"):
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
else:  # the FSDP2 API was public only from torch 2.6
    from torch.distributed._composable.fsdp import FSDPModule, register_fsdp_forward_method


# Attention implementations that take an arbitrary mask, which is what lets packed completions see one prefix
_BASE_IMPLEMENTATIONS = ("sdpa", "eager")
_IMPLEMENTATION_PREFIX = "prefix_sharing_"


class _AccumulateInFloat32(torch.autograd.Function):
    """Identity whose gradients, one per pass, are summed in float32 before they reach a half-precision tensor."""

    # The tensor that autograd sums into has no storage in the forward: it only carries the shape and the float32 dtype
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x.new_zeros(1, dtype=torch.float32).expand(x.shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


class _ReadWithFloat32Gradient(torch.autograd.Function):
    """Return `x`, sending its gradient in float32 to the `carrier` made by [`_AccumulateInFloat32`]."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad.float()


class _Prefix:
    """
    Keys and values of one prompt prefix, by layer.

    Args:
        positions (`torch.Tensor` of shape `(S,)`):
            Position of each prefix token.
    """

    def __init__(self, positions: torch.Tensor):
        self.positions = positions
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (1, num_key_value_heads, S, D) each
        self.carriers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        # Gradient checkpointing runs the layer again during the backward: what the forward recorded stands
        if layer_idx in self.layers:
            return
        if len(self.positions) == 0:  # what went through is not part of the prompt
            key, value = key[:, :, :0], value[:, :, :0]
        self.layers[layer_idx] = (key, value)
        # Autocast computes the value in half precision and, where keys are normalized, the key in float32
        half_precision = any(x.dtype in (torch.float16, torch.bfloat16) for x in (key, value))
        if half_precision and (key.requires_grad or value.requires_grad):
            self.carriers[layer_idx] = (_AccumulateInFloat32.apply(key), _AccumulateInFloat32.apply(value))

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.layers[layer_idx]
        if layer_idx in self.carriers:
            key_carrier, value_carrier = self.carriers[layer_idx]
            key = _ReadWithFloat32Gradient.apply(key.detach(), key_carrier)
            value = _ReadWithFloat32Gradient.apply(value.detach(), value_carrier)
        return key, value


@dataclass(frozen=True)
class _RecordPrefix:
    """Attention context of the prompt pass: attend as usual, and keep the keys and values."""

    prefix: _Prefix

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        self.prefix.record(module.layer_idx, key, value)
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class _ReadPrefix:
    """
    Attention context of a pass of completions, packed in one row after one another: each attends to the prefix and to
    itself.

    Neighboring completions attend together, behind one copy of the prefix, as long as what they would not need of one
    another is small beside the prefix. A completion that is long beside the prefix attends by itself.

    Args:
        prefix (`_Prefix`):
            Keys and values of the prompt.
        positions (`torch.Tensor` of shape `(T,)`):
            Position of each token of the row.
        rows (`torch.Tensor` of shape `(T,)`):
            Completion that each token of the row belongs to.
        blocks (`list[int]`):
            Number of tokens of each run of completions that attend together.
    """

    prefix: _Prefix
    positions: torch.Tensor
    rows: torch.Tensor
    blocks: list[int]

    @classmethod
    def of(cls, prefix: _Prefix, positions: torch.Tensor, rows: torch.Tensor) -> "_ReadPrefix":
        blocks = [0]
        for length in rows.bincount().tolist():
            if blocks[-1] + length > len(prefix.positions) // 4 and blocks[-1] > 0:
                blocks.append(0)
            blocks[-1] += length
        return cls(prefix, positions, rows, blocks)

    def allowed(self, mask_function) -> torch.Tensor:
        """
        Boolean mask of shape `(1, 1, T, S + longest block)`, from the model's own mask function (causal, sliding
        window). Behind the prefix, the columns are the tokens of the block.
        """
        device = self.positions.device
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        queries = self.positions[:, None]
        to_prefix = mask_function(zero, zero, queries, self.prefix.positions[None, :])
        sizes = torch.tensor(self.blocks, device=device)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        tokens = starts[:, None] + torch.arange(max(self.blocks), device=device)
        tokens = tokens.clamp(max=len(self.rows) - 1)  # columns that the last block does not have are cut off
        to_own = mask_function(zero, zero, queries, self.positions[tokens]) & (self.rows[:, None] == self.rows[tokens])
        return torch.cat([to_prefix.expand(len(self.rows), -1), to_own], dim=-1)[None, None]

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        prefix_size = len(self.prefix.positions)
        if attention_mask is None or attention_mask.shape[2:] != (len(self.rows), prefix_size + max(self.blocks)):
            raise RuntimeError(
                f"{type(module).__name__} did not receive the mask of the shared prefix, so its attention cannot be "
                "trusted. Set `prefix_sharing=False`."
            )
        prefix_key, prefix_value = self.prefix.read(module.layer_idx)
        outputs = []
        per_block = (x.split(self.blocks, dim=2) for x in (query, key, value, attention_mask))
        for block_query, block_key, block_value, mask in zip(*per_block, strict=True):
            mask = mask[..., : prefix_size + block_key.shape[2]]
            block_key = torch.cat([prefix_key, block_key], dim=2)
            block_value = torch.cat([prefix_value, block_value], dim=2)
            outputs.append(_masked_attention(base, module, block_query, block_key, block_value, mask, **kwargs)[0])
        return torch.cat(outputs, dim=1), None


# What the current forward is: the pass whose masks are being built, or the cache that `generate` is decoding with.
# The attention of a pass gets its context as a keyword argument instead, which gradient checkpointing replays.
_current_pass: ContextVar[_ReadPrefix | None] = ContextVar("current_pass", default=None)
_current_cache: ContextVar["SharedPrefixCache | None"] = ContextVar("current_cache", default=None)


@contextmanager
def _set(variable: ContextVar, value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _base_attention(base: str, module: nn.Module):
    # Eager attention is not in the interface: each modeling file defines its own
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _masked_attention(base, module, query, key, value, attention_mask, **kwargs):
    """
    Attention of a row of queries to keys shared by all of them, without expanding the keys of grouped-query attention.
    """
    num_heads, num_key_value_heads = query.shape[1], key.shape[1]
    if base != "sdpa" or num_heads == num_key_value_heads:
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)
    # `sdpa` repeats the keys and values for each query head when there is a mask. Query heads that read the same key
    # head become more queries of that head instead.
    groups = num_heads // num_key_value_heads
    num_queries = query.shape[2]
    attn_output = nn.functional.scaled_dot_product_attention(
        query.reshape(1, num_key_value_heads, groups * num_queries, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=kwargs.get("scaling"),
    )
    attn_output = attn_output.reshape(1, num_heads, num_queries, value.shape[-1])
    return attn_output.transpose(1, 2).contiguous(), None


def _attention(base, module, query, key, value, attention_mask, shared_prefix=None, **kwargs):
    if shared_prefix is None:
        shared_prefix = _current_cache.get()
    if shared_prefix is not None:
        return shared_prefix.attend(base, module, query, key, value, attention_mask, **kwargs)
    return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


def _mask(base, *, mask_function, use_vmap=False, dtype=torch.float32, **kwargs):
    current_pass = _current_pass.get()
    if current_pass is None:
        if _current_cache.get() is not None:
            kwargs["allow_is_causal_skip"] = False
        return ALL_MASK_ATTENTION_FUNCTIONS[base](
            mask_function=mask_function, use_vmap=use_vmap, dtype=dtype, **kwargs
        )
    if use_vmap:
        raise RuntimeError("The model uses a custom attention mask, which `prefix_sharing=True` does not support.")
    return _as_base_mask(base, current_pass.allowed(mask_function), dtype)


def _as_base_mask(base: str, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if base == "sdpa":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


for _base in _BASE_IMPLEMENTATIONS:
    AttentionInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_attention, _base))
    AttentionMaskInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_mask, _base))


@dataclass(frozen=True)
class SharedPrefixOutput:
    """
    Output of [`shared_prefix_forward`].

    Args:
        last_hidden_state (`torch.Tensor` of shape `(B, C + 1, H)`):
            Hidden states from the last prompt token on. Zero where the token is padding.
        aux_loss (`torch.Tensor`, *optional*):
            MoE load-balancing loss over the tokens of all rows, prompts included, when router logits are requested.
    """

    last_hidden_state: torch.Tensor
    aux_loss: torch.Tensor | None = None


def _group_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, group_size: int | None) -> list[torch.Tensor]:
    """
    Indices of the rows that share a prompt, one tensor a prompt, in the order in which the prompts appear. Rows share
    only within a block of `group_size` rows, so that two equal prompts stay two groups, as on the other processes.
    """
    masked_ids = prompt_ids.masked_fill(prompt_mask == 0, -1)
    blocks = torch.arange(len(prompt_ids), device=prompt_ids.device) // (group_size or len(prompt_ids))
    _, group_of_row = torch.unique(torch.cat([blocks[:, None], masked_ids], dim=1), dim=0, return_inverse=True)
    groups = {}
    for row, group in enumerate(group_of_row.tolist()):
        groups.setdefault(group, []).append(row)
    return [torch.tensor(rows, device=prompt_ids.device) for rows in groups.values()]


def _pass_inputs(backbone: nn.Module, ids: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """
    Inputs of each pass from its token ids. If the embedding is trained, the tokens of all passes are looked up together:
    the gradient of a lookup has the size of the whole vocabulary.
    """
    embedding = backbone.get_input_embeddings()
    if torch.is_grad_enabled() and any(param.requires_grad for param in embedding.parameters()):
        embeds = embedding(torch.cat([x.flatten() for x in ids])).split([x.numel() for x in ids])
        return [{"inputs_embeds": y.view(*x.shape, -1)} for x, y in zip(ids, embeds, strict=True)]
    return [{"input_ids": x} for x in ids]


def _split_by_tokens(lengths: list[int], budget: int, packed: bool) -> list[list[int]]:
    """
    Rows of each pass, so that a pass has no more than `budget` tokens, or a single row. Longest rows first, which leaves
    little padding where rows are padded to the longest of a pass (`packed=False`).
    """
    passes, room, width = [], 0, 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        size = lengths[row] if packed else width
        if not passes or size > room:
            passes.append([])
            room, size = budget, lengths[row]
            width = size
        passes[-1].append(row)
        room -= size
    return [sorted(rows) for rows in passes]


def _same_number_everywhere(passes: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Split passes until every process has as many: processes that shard the weights gather them together."""
    if not torch.distributed.is_initialized():
        return passes
    number = torch.tensor(len(passes), device=passes[0][1].device)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    while len(passes) < number:
        longest = max(range(len(passes)), key=lambda i: len(passes[i][1]))
        group, rows = passes[longest]
        passes[longest : longest + 1] = [(group, half) for half in rows.tensor_split(2)]
    return passes


def _run_passes(forward, pass_inputs: list[tuple]) -> list[tuple]:
    """Output of `forward` for the arguments of each pass, keeping the activations of one pass at a time."""
    outputs = []
    for i, args in enumerate(pass_inputs):
        if torch.is_grad_enabled() and i < len(pass_inputs) - 1:
            outputs.append(checkpoint(forward, *args, use_reentrant=False))
        else:  # the first to be needed by the backward, so its activations can stay
            outputs.append(forward(*args))
    return outputs


def _prefix_ids(ids: torch.Tensor) -> torch.Tensor:
    # A prompt of one token has no prefix, but it takes a pass all the same, with any token. Processes that shard the
    # weights gather them together in every pass, so the number of passes must not depend on the data.
    return ids if len(ids) > 0 else ids.new_zeros(1)


def _prompt_pass(forward: Callable, inputs: dict[str, torch.Tensor], positions: torch.Tensor, **kwargs):
    """Run a prompt without its last token through a model. Returns the prefix that it leaves, and the output."""
    prefix = _Prefix(positions)
    outputs = forward(
        **inputs,
        position_ids=_prefix_ids(positions)[None],
        use_cache=False,
        shared_prefix=_RecordPrefix(prefix),
        **kwargs,
    )
    return prefix, outputs


def _unshard_in_backward(backbone: nn.Module, prefix: _Prefix) -> None:
    """
    Have FSDP2 gather the weights of the last layer for the backward of a prompt pass. FSDP2 gathers those of a layer
    when the gradient of its output arrives, and the output of the last layer is not used, only its keys and values.
    """
    layer_idx = max(prefix.layers)
    units = [unit for unit in backbone.modules() if isinstance(unit, FSDPModule)]
    last = [unit for unit in units if any(getattr(m, "layer_idx", None) == layer_idx for m in unit.modules())]

    def reshard():
        for unit in units:
            unit.reshard()

    def unshard(grad):
        for unit in last:
            unit.unshard()
        # Gradient checkpointing runs all of the last layer again. What has no part in the keys and values has no
        # backward, after which FSDP2 would put the shards back: it would be trained no more.
        torch.autograd.Variable._execution_engine.queue_callback(reshard)

    for states in prefix.layers[layer_idx]:
        if units and states.requires_grad:
            states.register_hook(unshard)


def _router_sums(
    router_logits: tuple[torch.Tensor, ...], top_k: int, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Terms of the load-balancing loss that add up over tokens: how often and how likely each expert is chosen."""
    is_token = slice(None) if attention_mask is None else attention_mask.flatten().bool()
    logits = torch.cat([layer_logits.reshape(-1, layer_logits.shape[-1])[is_token] for layer_logits in router_logits])
    probs = nn.functional.softmax(logits, dim=-1)
    chosen = nn.functional.one_hot(probs.topk(top_k, dim=-1).indices, probs.shape[-1])
    return chosen.sum(0).to(probs.dtype), probs.sum(0), len(probs)


def _load_balancing_loss(router_sums: list[tuple[torch.Tensor, torch.Tensor, int]]) -> torch.Tensor:
    """Mixtral's load-balancing loss (Switch Transformer, equations 4 to 6) from the sums of [`_router_sums`]."""
    chosen, probs, count = (sum(terms) for terms in zip(*router_sums, strict=True))
    return ((chosen / count) * (probs / count)).sum() * probs.shape[-1]


def _completion_states(
    hidden_states: list[torch.Tensor], rows: list[torch.Tensor], columns: list[torch.Tensor], shape: tuple[int, int]
) -> torch.Tensor:
    """Hidden states of the tokens of all passes, of shape `(T, H)` each, in their places in `shape`, else zero."""
    states = torch.cat(hidden_states)
    return states.new_zeros(*shape, states.shape[-1]).index_put((torch.cat(rows), torch.cat(columns)), states)


def whole_rows_forward(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prefix_length: int,
    tokens_per_forward: int | None = None,
    output_router_logits: bool = False,
) -> SharedPrefixOutput:
    """
    Hidden states of completions, each with its prompt, in passes of at most `tokens_per_forward` tokens.

    Rows of similar length go through the backbone together, padded to the longest of them. Each pass but the last is
    checkpointed as a whole, so the activations of one pass are alive at a time.

    Args:
        backbone ([`~transformers.PreTrainedModel`]):
            Model without its LM head.
        input_ids (`torch.Tensor` of shape `(B, P + C)`):
            Left-padded prompts followed by right-padded completions.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding.
        prefix_length (`int`):
            Number of prompt columns, P.
        tokens_per_forward (`int`, *optional*):
            Tokens that go through the backbone together, padding included. A row that is longer goes by itself. If
            `None`, all rows go together.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            Whether to compute the load-balancing loss of a Mixture-of-Experts model.

    Returns:
        [`SharedPrefixOutput`]: Hidden states, and the load-balancing loss.
    """
    kwargs = {"use_cache": False}
    if output_router_logits:
        kwargs["output_router_logits"] = True
        top_k = backbone.config.get_text_config().num_experts_per_tok

    def forward(inputs, mask, position_ids=None):
        if position_ids is not None:
            inputs = {**inputs, "position_ids": position_ids}
        outputs = backbone(**inputs, attention_mask=mask, **kwargs)
        sums = _router_sums(outputs.router_logits, top_k, mask) if output_router_logits else None
        return outputs.last_hidden_state, sums

    # Not with several processes: if they shard the weights, they must all call the model equally often
    if tokens_per_forward is None or (
        input_ids.numel() <= tokens_per_forward and not torch.distributed.is_initialized()
    ):
        last_hidden_state, sums = forward({"input_ids": input_ids}, attention_mask)
        aux_loss = _load_balancing_loss([sums]) if output_router_logits else None
        return SharedPrefixOutput(last_hidden_state[:, prefix_length - 1 :], aux_loss)

    lengths = attention_mask.sum(1).tolist()
    passes = _split_by_tokens(lengths, tokens_per_forward, packed=False)
    passes = _same_number_everywhere([(0, torch.tensor(rows, device=input_ids.device)) for rows in passes])
    ids, masks, positions = [], [], []
    for _, rows in passes:
        # Positions are columns: the positions that a left-padded row has when it goes through the model by itself
        columns = [attention_mask[row].nonzero().squeeze(1) for row in rows]
        position_ids = nn.utils.rnn.pad_sequence(columns, batch_first=True)
        ids.append(input_ids[rows[:, None], position_ids])
        masks.append(nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in columns], batch_first=True))
        positions.append(position_ids)
    inputs = _pass_inputs(backbone, ids)

    outputs = _run_passes(forward, list(zip(inputs, masks, positions, strict=True)))
    states, all_rows, all_columns = [], [], []
    for (hidden_states, _), (_, rows), mask, position_ids in zip(outputs, passes, masks, positions, strict=True):
        row, token = (mask.bool() & (position_ids >= prefix_length - 1)).nonzero(as_tuple=True)
        states.append(hidden_states[row, token])
        all_rows.append(rows[row])
        all_columns.append(position_ids[row, token] - prefix_length + 1)
    shape = (len(input_ids), input_ids.shape[1] - prefix_length + 1)
    last_hidden_state = _completion_states(states, all_rows, all_columns, shape)
    aux_loss = _load_balancing_loss([sums for _, sums in outputs]) if output_router_logits else None
    return SharedPrefixOutput(last_hidden_state, aux_loss)


def shared_prefix_forward(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prefix_length: int,
    completions_per_forward: int | None = None,
    tokens_per_forward: int | None = None,
    group_size: int | None = None,
    output_router_logits: bool = False,
) -> SharedPrefixOutput:
    """
    Hidden states of completions, computing each distinct prompt once.

    The rows of a prompt go through the backbone in passes of `completions_per_forward`, or of as many as have
    `tokens_per_forward`, packed without padding. Each pass but the last is checkpointed as a whole, so the activations
    of one pass are alive at a time, and the backward adds up the gradient of the prompt's keys and values before it goes
    through the prompt, once.

    Args:
        backbone ([`~transformers.PreTrainedModel`]):
            Model without its LM head, prepared by [`enable_prefix_sharing`].
        input_ids (`torch.Tensor` of shape `(B, P + C)`):
            Left-padded prompts followed by right-padded completions.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding.
        prefix_length (`int`):
            Number of prompt columns, P.
        completions_per_forward (`int`, *optional*):
            Completions that go through the backbone together. If `None`, all completions of a prompt.
        tokens_per_forward (`int`, *optional*):
            Instead of a number of completions, the number of their tokens that go through the backbone together. A
            completion that is longer goes by itself.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt. It fixes the number of prompts, which must be the same on
            all processes if they shard the weights. If `None`, all rows with the same prompt share it.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            Whether to compute the load-balancing loss of a Mixture-of-Experts model.

    Returns:
        [`SharedPrefixOutput`]: Hidden states, and the load-balancing loss.
    """
    groups = _group_rows(input_ids[:, :prefix_length], attention_mask[:, :prefix_length], group_size)
    kwargs = {}
    if output_router_logits:
        kwargs["output_router_logits"] = True
        top_k = backbone.config.get_text_config().num_experts_per_tok

    # Where prompts are short there is nothing to save. Not with several processes: under FSDP, they must all call the
    # model equally often.
    num_rows = len(input_ids)
    if (completions_per_forward or num_rows) >= num_rows and not torch.distributed.is_initialized():
        prefix_tokens = sum(attention_mask[rows[0], : prefix_length - 1].sum() for rows in groups)
        shared_tokens = prefix_tokens + attention_mask[:, prefix_length:].sum() + num_rows
        if input_ids.numel() < 1.05 * shared_tokens:
            return whole_rows_forward(
                backbone, input_ids, attention_mask, prefix_length, tokens_per_forward, output_router_logits
            )

    # Positions are columns: the positions that a left-padded row has when it goes through the model by itself
    positions_of_group = [attention_mask[rows[0], : prefix_length - 1].nonzero().squeeze(1) for rows in groups]
    has_token = attention_mask[:, prefix_length - 1 :] != 0  # (B, C + 1)
    has_token[:, 0] = True  # the last prompt token
    passes = []  # of completions: group and rows
    for group, rows in enumerate(groups):
        chunks = rows.split(completions_per_forward or len(rows))
        if tokens_per_forward is not None:
            lengths = has_token[rows].sum(1).tolist()
            chunks = [rows[chunk] for chunk in _split_by_tokens(lengths, tokens_per_forward, packed=True)]
        passes.extend((group, chunk) for chunk in chunks)
    if tokens_per_forward is not None:
        passes = _same_number_everywhere(passes)
    ids = [_prefix_ids(input_ids[rows[0], pos]) for rows, pos in zip(groups, positions_of_group, strict=True)]
    all_rows, all_columns = [], []  # of each token of a pass
    for _, rows in passes:
        row, column = has_token[rows].nonzero(as_tuple=True)
        ids.append(input_ids[rows[row], column + prefix_length - 1])
        all_rows.append(rows[row])
        all_columns.append(column)
    inputs = _pass_inputs(backbone, [pass_ids[None] for pass_ids in ids])

    prefixes, router_sums = [], []
    for rows, positions in zip(groups, positions_of_group, strict=True):
        prefix, outputs = _prompt_pass(backbone, inputs[len(prefixes)], positions, **kwargs)
        if len(prefix.layers) != backbone.config.num_hidden_layers:
            raise RuntimeError(
                f"{len(prefix.layers)} of {backbone.config.num_hidden_layers} layers of {type(backbone).__name__} "
                "passed their keys and values to `transformers.AttentionInterface`, so its prompts cannot be "
                "shared. Set `prefix_sharing=False`."
            )
        _unshard_in_backward(backbone, prefix)
        if output_router_logits and len(positions) > 0:  # a prompt counts once for each of its rows
            router_sums.append([len(rows) * x for x in _router_sums(outputs.router_logits, top_k)])
        prefixes.append(prefix)

    def forward_completions(context, pass_inputs):
        with _set(_current_pass, context):
            outputs = backbone(
                **pass_inputs,
                # Without a mask, restarting positions would be taken for a padding-free batch
                attention_mask=torch.ones_like(context.positions)[None],
                position_ids=context.positions[None],
                use_cache=False,
                shared_prefix=context,
                **kwargs,
            )
        sums = _router_sums(outputs.router_logits, top_k) if output_router_logits else None
        return outputs.last_hidden_state[0], sums

    contexts = [
        _ReadPrefix.of(prefixes[group], positions=column + prefix_length - 1, rows=row)
        for (group, _), row, column in zip(passes, all_rows, all_columns, strict=True)
    ]
    outputs = _run_passes(forward_completions, list(zip(contexts, inputs[len(groups) :], strict=True)))
    last_hidden_state = _completion_states([x for x, _ in outputs], all_rows, all_columns, has_token.shape)
    router_sums.extend(sums for _, sums in outputs)
    aux_loss = _load_balancing_loss(router_sums) if output_router_logits else None
    return SharedPrefixOutput(last_hidden_state, aux_loss)


class _SharedPrefixLayer(CacheLayerMixin):
    """
    Cache layer that holds a prefix once for all rows of its group, followed by what the rows generated: one key of
    each row after another, step by step, so that prefix and rows are one contiguous run of keys.
    """

    is_sliding = False  # it keeps every key: the mask applies the sliding window

    def __init__(
        self,
        prefix_states: list[tuple[torch.Tensor, torch.Tensor]],
        groups: list[torch.Tensor],
        prefix_length: int,
    ):
        super().__init__()
        self.prefix_length = prefix_length
        self.states = list(prefix_states)  # per group, keys and values of shape (1, num_key_value_heads, >= S, D)
        self.prefix_sizes = [key.shape[2] for key, _ in prefix_states]
        self.groups = groups
        self.num_steps = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass  # the prefix is there from the start

    def get_seq_length(self) -> int:
        return self.prefix_length + self.num_steps

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(self, key_states, value_states, *args, **kwargs):
        # Not kept: it may be the compressed form (multi-head latent attention) of the keys that a prefix consists of
        return key_states, value_states

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        for group, rows in enumerate(self.groups):
            start = self.prefix_sizes[group] + self.num_steps * len(rows)
            end = start + len(rows)
            if end > self.states[group][0].shape[2]:
                # Room for as many steps again, at least 64
                extra = max(64, self.num_steps) * len(rows)
                self.states[group] = tuple(
                    torch.cat([x[:, :, :start], x.new_empty(*x.shape[:2], extra, x.shape[3])], dim=2)
                    for x in self.states[group]
                )
            for states, new_states in zip(self.states[group], (key, value), strict=True):
                states[:, :, start:end] = new_states[rows].transpose(0, 2)  # (1, num_key_value_heads, N, D)
        self.num_steps += 1

    def read(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.prefix_sizes[group] + self.num_steps * len(self.groups[group])
        return tuple(x[:, :, :end] for x in self.states[group])


class SharedPrefixCache(Cache):
    """
    Cache for decoding several completions of a prompt, with the prompt's keys and values stored once.

    Args:
        prefixes (`list[_Prefix]`):
            Prefix of each group.
        groups (`list[torch.Tensor]`):
            Rows of each group.
        prefix_mask (`torch.Tensor` of shape `(B, P - 1)`):
            1 for prefix tokens, 0 for padding.
    """

    def __init__(self, prefixes: list[_Prefix], groups: list[torch.Tensor], prefix_mask: torch.Tensor):
        self.groups = groups
        self.row_order = torch.cat(groups).argsort()
        self.prefix_length = prefix_mask.shape[1]
        self.prefix_columns = [prefix_mask[rows[0]].nonzero().squeeze(1) for rows in groups]
        num_layers = len(prefixes[0].layers)
        super().__init__(
            layers=[
                _SharedPrefixLayer([prefix.layers[layer_idx] for prefix in prefixes], groups, self.prefix_length)
                for layer_idx in range(num_layers)
            ]
        )
        self._masks = []

    def _group_masks(self, base: str, attention_mask: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        # The layers of a step share one mask, or two where some slide: each is laid out for the groups once
        for seen, masks in self._masks:
            if seen is attention_mask:
                return masks
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        masks = []
        for rows, columns in zip(self.groups, self.prefix_columns, strict=True):
            allowed_rows = allowed[rows, 0, 0]  # (N, P - 1 + number of steps)
            own = allowed_rows[:, self.prefix_length :, None] & torch.eye(
                len(rows), dtype=torch.bool, device=rows.device
            ).unsqueeze(1)
            group_mask = torch.cat([allowed_rows[:, columns], own.flatten(1)], dim=1)[None, None]
            masks.append(_as_base_mask(base, group_mask, dtype))
        if len(self._masks) == 2:
            self._masks.pop(0)
        self._masks.append((attention_mask, masks))
        return masks

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        layer = self.layers[module.layer_idx]
        layer.append(key, value)
        masks = self._group_masks(base, attention_mask, query.dtype)
        group_outputs = []
        for group, rows in enumerate(self.groups):
            group_query = query[rows].transpose(0, 2)  # (1, num_heads, N, D)
            group_output, _ = _masked_attention(base, module, group_query, *layer.read(group), masks[group], **kwargs)
            group_outputs.append(group_output.transpose(0, 1))
        # Autocast may have attended in another dtype than that of the query
        return torch.cat(group_outputs)[self.row_order], None


def generate_with_shared_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    generation_config: GenerationConfig,
    group_size: int | None = None,
) -> torch.Tensor:
    """
    [`~transformers.GenerationMixin.generate`], computing and storing each distinct prompt once.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model prepared by [`enable_prefix_sharing`].
        input_ids (`torch.Tensor` of shape `(B, P)`):
            Left-padded prompts.
        attention_mask (`torch.Tensor` of shape `(B, P)`):
            1 for tokens, 0 for padding.
        generation_config ([`~transformers.GenerationConfig`]):
            Greedy decoding or sampling.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt, see [`shared_prefix_forward`].

    Returns:
        `torch.Tensor` of shape `(B, P + C)`: Prompts followed by what was generated.
    """
    forward = model
    if is_peft_model(model):
        # As `generate` of a PEFT model does, past the forward of the PEFT model, which Accelerate wraps in autocast
        forward = model.get_base_model()
        if isinstance(model, FSDPModule):  # it gathers weights in methods that it knows
            model._base_forward = types.MethodType(lambda self, **kwargs: self.get_base_model()(**kwargs), model)
            register_fsdp_forward_method(model, "_base_forward")
            forward = model._base_forward

    groups = _group_rows(input_ids, attention_mask, group_size)
    prefixes = []
    for rows in groups:
        prefix_ids = input_ids[rows[0], :-1][attention_mask[rows[0], :-1].bool()]
        # Positions without padding, as `generate` continues them
        positions = torch.arange(len(prefix_ids), device=prefix_ids.device)
        inputs = {"input_ids": _prefix_ids(prefix_ids)[None]}
        prefixes.append(_prompt_pass(forward, inputs, positions, logits_to_keep=1)[0])
    cache = SharedPrefixCache(prefixes, groups, attention_mask[:, :-1])
    with _set(_current_cache, cache):
        return model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            past_key_values=cache,
            use_cache=True,  # whatever the generation config says: without the cache there is no prefix
        )


def _rope_types(text_config) -> set[str]:
    parameters = text_config.rope_parameters if hasattr(text_config, "rope_parameters") else {}
    parameters = parameters or {}
    # One set of parameters for all layers, or one for each type of layer
    per_layer_type = parameters.values() if all(isinstance(x, dict) for x in parameters.values()) else [parameters]
    return {x.get("rope_type", "default") for x in per_layer_type}


def enable_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Route the attention of `model` through a function that can attend to a shared prefix. Without a shared prefix, it
    calls the implementation that the model was loaded with.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.

    Raises:
        ValueError: If the model or its attention implementation cannot share a prefix exactly.
    """

    def refuse(reason: str):
        raise ValueError(
            f"`prefix_sharing=True` does not support {type(model).__name__} ({model.config.model_type}): {reason}"
        )

    if is_peft_model(model):
        if model.active_peft_config.is_prompt_learning:
            refuse(
                f"{model.active_peft_config.peft_type} puts learned tokens in front of each sequence. Set "
                "`prefix_sharing=False`."
            )
        model = model.get_base_model()
    implementation = model.config._attn_implementation
    if implementation.startswith(_IMPLEMENTATION_PREFIX):
        return

    text_config = model.config.get_text_config()
    if text_config is not model.config or model.config.is_encoder_decoder:
        refuse("only text-only causal language models can share a prompt. Set `prefix_sharing=False`.")
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if unsupported := layer_types - {"full_attention", "sliding_attention"}:
        refuse(
            f"it has layers of type {sorted(unsupported)}, whose state cannot be shared. Set `prefix_sharing=False`."
        )
    if not model._supports_attention_backend:
        refuse("its attention does not go through `transformers.AttentionInterface`. Set `prefix_sharing=False`.")
    if implementation not in _BASE_IMPLEMENTATIONS:
        refuse(
            f"its attention implementation is {implementation!r}, which does not take the mask that a shared prefix "
            "needs. Load the model with `attn_implementation='sdpa'`."
        )
    rope_types = _rope_types(text_config)
    if unsupported := rope_types & {"dynamic", "longrope"}:
        refuse(
            f"its rotary embedding ({sorted(unsupported)}) depends on the length of the whole sequence, so the prompt "
            "alone does not have the keys of the full sequence. Set `prefix_sharing=False`."
        )
    dropout = {f"`{name}`": module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    dropout["`attention_dropout`"] = getattr(text_config, "attention_dropout", 0.0)
    for name, p in dropout.items():
        if p > 0:
            refuse(
                f"the completions of a prompt would share its dropout ({name} is {p}). Set dropout to 0, with "
                "`disable_dropout=True` for layers, `lora_dropout=0.0` for adapters and `attention_dropout=0.0` in the "
                "model's config."
            )
    model.set_attn_implementation(_IMPLEMENTATION_PREFIX + implementation)
    try:
        error = _error_of_passes(model, functools.partial(shared_prefix_forward, completions_per_forward=2))
        if error > torch.finfo(model.dtype).eps ** 0.5:
            refuse(
                f"hidden states behind a shared prompt differ from those of whole sequences by {error:.1%}. Set "
                "`prefix_sharing=False`."
            )
    except (RuntimeError, ValueError):
        model.set_attn_implementation(implementation)
        raise


@contextmanager
def use_base_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give `model` back the attention implementation it was loaded with, for an engine that brings its own."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(implementation.removeprefix(_IMPLEMENTATION_PREFIX))
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def check_whole_rows(model: PreTrainedModel) -> None:
    """
    Check that rows go through `model` in passes with the same result as together.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.

    Raises:
        ValueError: If they do not.
    """
    if is_peft_model(model):
        model = model.get_base_model()

    def refuse(reason: str):
        raise ValueError(
            f"`tokens_per_forward` does not support {type(model).__name__} ({model.config.model_type}): {reason}. Remove "
            "it and lower `per_device_train_batch_size` instead."
        )

    if unsupported := _rope_types(model.config.get_text_config()) & {"dynamic", "longrope"}:
        refuse(f"its rotary embedding ({sorted(unsupported)}) depends on the longest row that goes with a row")
    error = _error_of_passes(model, functools.partial(whole_rows_forward, tokens_per_forward=1))
    if error > torch.finfo(model.dtype).eps ** 0.5:
        refuse(f"hidden states of rows differ by {error:.1%} from those of the same rows together")


def _error_of_passes(model: PreTrainedModel, forward) -> float:
    """Relative error of hidden states that `forward` computes in passes, on a few tokens: the median over tokens."""
    if any(param.is_meta or param.numel() == 0 for param in model.parameters()):
        return 0.0  # the weights are on other processes
    prefix_length = 6
    weight = model.get_input_embeddings().weight
    input_ids = (torch.arange(18, device=weight.device) % weight.shape[0]).view(2, 9)
    input_ids[1, :prefix_length] = input_ids[0, :prefix_length]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[:, 0] = 0  # left padding of the prompt
    attention_mask[1, -1] = 0  # right padding of a completion
    training = model.training
    model.eval()
    try:
        # Gradients are on, because the passes of training look their tokens up in another way
        passes = forward(model.base_model, input_ids, attention_mask, prefix_length).last_hidden_state
        whole = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    finally:
        model.train(training)
    has_token = attention_mask[:, prefix_length - 1 :].bool()
    whole = whole[:, prefix_length - 1 :][has_token].float()
    difference = passes[has_token].float() - whole
    return (difference.norm(dim=-1) / whole.norm(dim=-1)).median().item()
