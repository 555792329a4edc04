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

Shape suffixes: B rows, P prompt columns, C completion columns, S prefix tokens, T tokens of a packed pass, N rows that
share a prompt, H hidden size, D head size.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .passes import (
    PROBE_PREFIX_LENGTH,
    PassesOutput,
    completion_states,
    error_of_passes,
    forward_together,
    load_balancing_loss,
    pass_inputs,
    position_shift,
    rope_parameters,
    router_sums,
    run_passes,
    tolerated_error,
)


# Attention implementations that take an arbitrary mask, which is what lets packed completions see one prefix
_BASE_IMPLEMENTATIONS = ("sdpa", "eager")
_IMPLEMENTATION_PREFIX = "prefix_sharing_"

# Completions that attend together save copies of the prefix, at the cost of scores between tokens of different
# completions, which the mask throws away. Those stay below a quarter of the scores with the prefix.
_MAX_BLOCK_PER_PREFIX = 1 / 4

# Grouping rows and packing passes takes time, too: where sharing would save less than 5 % of the tokens, whole rows go
# through the model
_MIN_TOKEN_RATIO = 1.05


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


class SharedPrefix:
    """
    Keys and values of one prompt prefix, by layer.

    Args:
        positions (`torch.Tensor` of shape `(S,)`):
            Position of each prefix token.
    """

    def __init__(self, positions: torch.Tensor):
        self.positions = positions
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (1, num_key_value_heads, S, D) each
        # Layer whose keys and values each layer attends to: itself, or an earlier one (Gemma 3n, Gemma 4)
        self.sources: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}  # as they were recorded
        self.carriers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        # Gradient checkpointing runs the layer again during the backward: what the forward recorded stands
        if layer_idx in self.sources:
            return
        self.sources[layer_idx] = next((idx for idx, seen in self._keys.items() if seen is key), layer_idx)
        if self.sources[layer_idx] != layer_idx:
            return
        self._keys[layer_idx] = key
        if len(self.positions) == 0:  # what went through is not part of the prompt
            key, value = key[:, :, :0], value[:, :, :0]
        self.layers[layer_idx] = (key, value)
        # Autocast computes the value in half precision and, where keys are normalized, the key in float32
        half_precision = any(x.dtype in (torch.float16, torch.bfloat16) for x in (key, value))
        if half_precision and (key.requires_grad or value.requires_grad):
            self.carriers[layer_idx] = (_AccumulateInFloat32.apply(key), _AccumulateInFloat32.apply(value))

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer_idx = self.sources[layer_idx]
        key, value = self.layers[layer_idx]
        if layer_idx in self.carriers:
            key_carrier, value_carrier = self.carriers[layer_idx]
            key = _ReadWithFloat32Gradient.apply(key.detach(), key_carrier)
            value = _ReadWithFloat32Gradient.apply(value.detach(), value_carrier)
        return key, value


@dataclass(frozen=True)
class RecordPrefix:
    """Attention context of the prompt pass: attend as usual, and keep the keys and values."""

    prefix: SharedPrefix

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        self.prefix.record(module.layer_idx, key, value)
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class ReadPrefix:
    """
    Attention context of a pass of completions, packed in one row after one another: each attends to the prefix and to
    itself.

    Neighboring completions attend together, behind one copy of the prefix, as long as they are short beside it. A
    completion that is long beside the prefix attends by itself.

    Args:
        prefix (`SharedPrefix`):
            Keys and values of the prompt.
        positions (`torch.Tensor` of shape `(T,)`):
            Position of each token of the row.
        rows (`torch.Tensor` of shape `(T,)`):
            Completion that each token of the row belongs to.
        blocks (`list[int]`):
            Number of tokens of each run of completions that attend together.
    """

    prefix: SharedPrefix
    positions: torch.Tensor
    rows: torch.Tensor
    blocks: list[int]

    @classmethod
    def of(cls, prefix: SharedPrefix, positions: torch.Tensor, rows: torch.Tensor) -> "ReadPrefix":
        blocks = [0]
        for length in rows.bincount().tolist():
            if blocks[-1] + length > len(prefix.positions) * _MAX_BLOCK_PER_PREFIX and blocks[-1] > 0:
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
        # Chunks are counted from the first token that is not padding
        start = self.prefix.positions[:1] if len(self.prefix.positions) > 0 else self.positions.min()
        positions = self.positions - start
        queries = positions[:, None]
        to_prefix = mask_function(zero, zero, queries, (self.prefix.positions - start)[None, :])
        sizes = torch.tensor(self.blocks, device=device)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        tokens = starts[:, None] + torch.arange(max(self.blocks), device=device)
        tokens = tokens.clamp(max=len(self.rows) - 1)  # columns that the last block does not have are cut off
        to_own = mask_function(zero, zero, queries, positions[tokens]) & (self.rows[:, None] == self.rows[tokens])
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
            outputs.append(masked_attention(base, module, block_query, block_key, block_value, mask, **kwargs)[0])
        return torch.cat(outputs, dim=1), None


# What the current forward is: the pass whose masks are being built, or the cache that `generate` is decoding with.
# The attention of a pass gets its context as a keyword argument instead, which gradient checkpointing replays.
_current_pass: ContextVar[ReadPrefix | None] = ContextVar("current_pass", default=None)
_current_cache: ContextVar = ContextVar("current_cache", default=None)


@contextmanager
def _set(variable: ContextVar, value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def attend_to_cache(cache) -> Iterator[None]:
    """Have the attention of every forward go through `cache.attend`, see [`SharedPrefixCache`]."""
    with _set(_current_cache, cache):
        yield


def _base_attention(base: str, module: nn.Module):
    # Eager attention is not in the interface: each modeling file defines its own
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def masked_attention(base, module, query, key, value, attention_mask, **kwargs):
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
    return as_base_mask(base, current_pass.allowed(mask_function), dtype)


def as_base_mask(base: str, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if base == "sdpa":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


for _base in _BASE_IMPLEMENTATIONS:
    AttentionInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_attention, _base))
    AttentionMaskInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_mask, _base))


def group_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, group_size: int | None) -> list[torch.Tensor]:
    """
    Indices of the rows that share a prompt, one tensor a prompt, in the order in which the prompts appear. Rows share
    only within a block of `group_size` rows, so that two equal prompts stay two groups, as on the other processes.

    Raises:
        ValueError: If a prompt has no token.
    """
    empty = (prompt_mask.sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"The prompt of row {empty[0]} of the batch is empty, and a completion needs a token to follow. Remove "
            "empty prompts from the dataset."
        )
    masked_ids = prompt_ids.masked_fill(prompt_mask == 0, -1)
    blocks = torch.arange(len(prompt_ids), device=prompt_ids.device) // (group_size or len(prompt_ids))
    _, group_of_row = torch.unique(torch.cat([blocks[:, None], masked_ids], dim=1), dim=0, return_inverse=True)
    groups = {}
    for row, group in enumerate(group_of_row.tolist()):
        groups.setdefault(group, []).append(row)
    return [torch.tensor(rows, device=prompt_ids.device) for rows in groups.values()]


def at_least_one(ids: torch.Tensor) -> torch.Tensor:
    # A prompt of one token has no prefix, but it takes a pass all the same, with any token. Processes that shard the
    # weights gather them together in every pass, so the number of passes must not depend on the data.
    return ids if len(ids) > 0 else ids.new_zeros(1)


def prompt_pass(forward: Callable, inputs: dict[str, torch.Tensor], positions: torch.Tensor, **kwargs):
    """Run a prompt without its last token through a model. Returns the prefix that it leaves, and the output."""
    prefix = SharedPrefix(positions)
    outputs = forward(
        **inputs,
        position_ids=at_least_one(positions)[None],
        use_cache=False,
        shared_prefix=RecordPrefix(prefix),
        **kwargs,
    )
    return prefix, outputs


@dataclass(frozen=True)
class SharedPrefixPasses:
    """
    Each distinct prompt goes through the model once, then its completions in passes, packed without padding.

    Each pass but the last is checkpointed as a whole, so the activations of one pass are alive at a time, and the
    backward adds up the gradient of the prompt's keys and values before it goes through the prompt, once.

    Args:
        prefix_length (`int`):
            Number of prompt columns, P.
        completions_per_forward (`int`, *optional*):
            Completions of a prompt that go through the model together. If `None`, all of them.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt. It fixes the number of prompts, which must be the same on
            all processes if they shard the weights. If `None`, all rows with the same prompt share it.
    """

    prefix_length: int
    completions_per_forward: int | None = None
    group_size: int | None = None

    def forward(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
    ) -> PassesOutput:
        """
        Hidden states of completions.

        Args:
            backbone ([`~transformers.PreTrainedModel`]):
                Model without its LM head, prepared by [`enable_prefix_sharing`].
            input_ids (`torch.Tensor` of shape `(B, P + C)`):
                Left-padded prompts followed by right-padded completions.
            attention_mask (`torch.Tensor` of shape `(B, P + C)`):
                1 for tokens, 0 for padding.
            output_router_logits (`bool`, *optional*, defaults to `False`):
                Whether to compute the load-balancing loss of a Mixture-of-Experts model.

        Returns:
            [`PassesOutput`]: Hidden states, and the load-balancing loss.
        """
        prompt_mask = attention_mask[:, : self.prefix_length]
        groups = group_rows(input_ids[:, : self.prefix_length], prompt_mask, self.group_size)
        if self._sharing_saves_little(input_ids, attention_mask, groups):
            return self.forward_whole_rows(backbone, input_ids, attention_mask, output_router_logits)
        kwargs = {"output_router_logits": True} if output_router_logits else {}

        # Positions are columns: the positions that a left-padded row has when it goes through the model by itself
        positions_of_group = [prompt_mask[rows[0], :-1].nonzero().squeeze(1) for rows in groups]
        has_token = attention_mask[:, self.prefix_length - 1 :] != 0  # (B, C + 1)
        has_token[:, 0] = True  # the last prompt token
        passes = self.divide(groups, has_token)
        ids = [at_least_one(input_ids[rows[0], pos]) for rows, pos in zip(groups, positions_of_group, strict=True)]
        all_rows, all_columns = [], []  # of each token of a pass
        for _, rows in passes:
            row, column = has_token[rows].nonzero(as_tuple=True)
            ids.append(input_ids[rows[row], column + self.prefix_length - 1])
            all_rows.append(rows[row])
            all_columns.append(column)
        inputs = pass_inputs(backbone, [pass_ids[None] for pass_ids in ids])
        shift = position_shift(backbone.config, input_ids.shape[1], self.prefix_length)

        prefixes, sums = [], []
        for rows, positions in zip(groups, positions_of_group, strict=True):
            prefix, outputs = prompt_pass(backbone, inputs[len(prefixes)], positions + shift, **kwargs)
            num_layers = backbone.config.get_text_config().num_hidden_layers
            if len(prefix.sources) != num_layers:
                raise RuntimeError(
                    f"{len(prefix.sources)} of {num_layers} layers of {type(backbone).__name__} passed their keys "
                    "and values to `transformers.AttentionInterface`, so its prompts cannot be shared. Set "
                    "`prefix_sharing=False`."
                )
            if output_router_logits and len(positions) > 0:  # a prompt counts once for each of its rows
                sums.append([len(rows) * x for x in router_sums(backbone, outputs.router_logits)])
            prefixes.append(prefix)

        def forward_completions(context, model_inputs):
            with _set(_current_pass, context):
                outputs = backbone(
                    **model_inputs,
                    # Without a mask, restarting positions would be taken for a padding-free batch
                    attention_mask=torch.ones_like(context.positions)[None],
                    position_ids=context.positions[None],
                    use_cache=False,
                    shared_prefix=context,
                    **kwargs,
                )
            sums = router_sums(backbone, outputs.router_logits) if output_router_logits else None
            return outputs.last_hidden_state[0], sums

        contexts = [
            ReadPrefix.of(prefixes[group], positions=column + self.prefix_length - 1 + shift, rows=row)
            for (group, _), row, column in zip(passes, all_rows, all_columns, strict=True)
        ]
        outputs = run_passes(forward_completions, list(zip(contexts, inputs[len(groups) :], strict=True)))
        last_hidden_state = completion_states([x for x, _ in outputs], all_rows, all_columns, has_token.shape)
        sums.extend(pass_sums for _, pass_sums in outputs)
        return PassesOutput(last_hidden_state, load_balancing_loss(sums) if output_router_logits else None)

    def _sharing_saves_little(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, groups: list[torch.Tensor]
    ) -> bool:
        # Only where one pass would hold all rows, and not with several processes: under FSDP, they must all call the
        # model equally often
        num_rows = len(input_ids)
        if (self.completions_per_forward or num_rows) < num_rows or torch.distributed.is_initialized():
            return False
        prefix_tokens = sum(attention_mask[rows[0], : self.prefix_length - 1].sum() for rows in groups)
        shared_tokens = prefix_tokens + attention_mask[:, self.prefix_length :].sum() + num_rows
        return bool(input_ids.numel() < _MIN_TOKEN_RATIO * shared_tokens)

    def forward_whole_rows(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
    ) -> PassesOutput:
        """[`~SharedPrefixPasses.forward`] without sharing: each completion goes through the model with its prompt."""
        return forward_together(backbone, input_ids, attention_mask, self.prefix_length, output_router_logits)

    def divide(self, groups: list[torch.Tensor], has_token: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """
        Group and rows of each pass of completions.

        Args:
            groups (`list[torch.Tensor]`):
                Rows of each group.
            has_token (`torch.Tensor` of shape `(B, C + 1)`):
                Whether there is a token, from the last prompt token on.
        """
        passes = []
        for group, rows in enumerate(groups):
            passes.extend((group, chunk) for chunk in rows.split(self.completions_per_forward or len(rows)))
        return passes


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
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation
    if implementation.startswith(_IMPLEMENTATION_PREFIX):
        return

    if model.config.is_encoder_decoder or getattr(text_config, "cross_attention_layers", None):
        refuse("only decoders without cross-attention can share a prompt. Set `prefix_sharing=False`.")
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if unsupported := layer_types - {"full_attention", "sliding_attention", "chunked_attention"}:
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
    if any("dynamic" in x.get("rope_type", "") for x in rope_parameters(text_config)):
        refuse(
            "its rotary embedding (dynamic) depends on the length of the whole sequence, and on earlier ones, so the "
            "prompt alone does not have the keys of the full sequence. Set `prefix_sharing=False`."
        )
    for name, module in model.named_modules():
        # Attention that goes through the interface has a probability in place of a layer
        for p in (getattr(module, attribute, None) for attribute in ("p", "attention_dropout", "attn_dropout")):
            if isinstance(p, float) and p > 0:
                refuse(
                    f"the completions of a prompt would share its dropout (that of `{name}` is {p}). Set "
                    "`disable_dropout=True`, and for adapters `lora_dropout=0.0`."
                )
    with _attention_implementation(model, _IMPLEMENTATION_PREFIX + implementation):
        try:
            error = error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH))
        except torch.OutOfMemoryError:
            raise
        except Exception as exception:
            refuse(
                f"a shared prompt fails in it ({type(exception).__name__}: {exception}). Set `prefix_sharing=False`."
            )
    if error > tolerated_error(model):
        refuse(
            f"hidden states behind a shared prompt differ from those of whole sequences by {error:.1%}. Set "
            "`prefix_sharing=False`."
        )
    _set_attention_implementation(model, _IMPLEMENTATION_PREFIX + implementation)


def _set_attention_implementation(model: PreTrainedModel, implementation: str) -> None:
    # Of a multimodal model, that of the text part: towers keep theirs
    text_config = model.config.get_text_config()
    parts = {name: implementation for name in model.config.sub_configs if getattr(model.config, name) is text_config}
    model.set_attn_implementation({"": implementation, **parts})


@contextmanager
def _attention_implementation(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    before = model.config.get_text_config()._attn_implementation
    _set_attention_implementation(model, implementation)
    try:
        yield
    finally:
        _set_attention_implementation(model, before)


@contextmanager
def use_base_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give `model` back the attention implementation it was loaded with, for an engine that brings its own."""
    implementation = model.config.get_text_config()._attn_implementation.removeprefix(_IMPLEMENTATION_PREFIX)
    with _attention_implementation(model, implementation):
        yield
