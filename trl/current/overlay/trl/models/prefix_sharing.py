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
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .passes import (
    PROBE_PREFIX_LENGTH,
    PassesOutput,
    check_mask,
    completion_states,
    error_of_passes,
    forward_together,
    has_several_processes,
    load_balancing_loss,
    pass_inputs,
    position_shift,
    rope_parameters,
    router_sums,
    run_passes,
)
from .prefix_memory import KEY, VALUE, SharedPrefix
from .prefix_sharing_attention import Runs, is_plain, kernels_take, shared_prefix_attention
from .prefix_sharing_fsdp2 import unshard_in_backward
from .prefix_sharing_images import MultimodalInputs, rope_position_ids
from .prefix_sharing_micro_batches import OpenPrefix
from .prefix_sharing_states import (
    SUPPORTED_LAYER_TYPES,
    ReadStates,
    RecordStates,
    find_mixers,
    ignores_state,
    layers_by_kind,
    share_states,
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

# A layer's probability, and those that attention and blocks have in place of a layer
_DROPOUTS = ("p", "attention_dropout", "attn_dropout", "residual_dropout", "embedding_dropout")


@dataclass(frozen=True)
class RecordPrefix:
    """Attention context of the prompt pass: attend as usual, and keep the keys and values."""

    prefix: SharedPrefix

    @property
    def states(self) -> RecordStates:
        return RecordStates(self.prefix)

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        self.prefix.write_attention(module.layer_idx, key, value)
        return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class ReadPrefix:
    """
    Attention context of a pass of completions, packed in one row after one another: each attends to the prefix and to
    itself. Without a mask if the layer's is a plain causal one, see [`SharedPrefixAttention`].

    With a mask, neighboring completions attend together, behind one copy of the prefix, as long as they are short
    beside it. A completion that is long beside the prefix attends by itself.

    Args:
        prefix (`SharedPrefix`):
            Keys and values of the prompt.
        positions (`torch.Tensor` of shape `(T,)`):
            Position of each token of the row.
        rows (`torch.Tensor` of shape `(T,)`):
            Completion that each token of the row belongs to.
        runs (`Runs`):
            Tokens of each completion.
        blocks (`list[int]`):
            Number of tokens of each run of completions that attend together.
        states (`ReadStates`):
            What layers with a state start from.
    """

    prefix: SharedPrefix
    positions: torch.Tensor
    rows: torch.Tensor
    runs: Runs
    blocks: list[int]
    states: ReadStates

    @classmethod
    def of(
        cls,
        prefix: SharedPrefix,
        positions: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        lengths: list[int],
    ) -> "ReadPrefix":
        """
        Context of completions of these `lengths`, of which each token is in a row and column.
        """
        blocks = [0]
        for length in lengths:
            if blocks[-1] + length > len(prefix.positions) * _MAX_BLOCK_PER_PREFIX and blocks[-1] > 0:
                blocks.append(0)
            blocks[-1] += length
        runs = Runs.of(lengths, rows.device)
        return cls(prefix, positions, rows, runs, blocks, ReadStates.of(prefix, rows, columns, lengths))

    def allowed(self, mask_function) -> torch.Tensor:
        """
        Boolean mask of shape `(1, 1, T, S + longest block)`, from the model's own mask function (causal, sliding
        window). Behind the prefix, the columns are the tokens of the block.
        """
        device = self.positions.device
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        prefix_size, prefix_positions = len(self.prefix.positions), self.prefix.positions[None, :]
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
        prefix_size = len(self.prefix.positions)
        if attention_mask is None or attention_mask.shape[2:] not in (
            (len(self.rows), 0), (len(self.rows), prefix_size + max(self.blocks))
        ):  # fmt: skip
            raise RuntimeError(
                f"{type(module).__name__} did not receive the mask of the shared prefix, so its attention cannot be "
                "trusted. Set `prefix_sharing=False`."
            )
        prefix_key, prefix_value = self.prefix.read_attention(module.layer_idx)
        if attention_mask.shape[3] == 0:
            if is_plain(kwargs):
                tensors = (query, key, value, prefix_key, prefix_value)
                return shared_prefix_attention(*tensors, self.runs, kwargs.get("scaling")), None
            attention_mask = self.allowed(causal_mask_function)
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
def attend_to_cache(model: PreTrainedModel, cache) -> Iterator[None]:
    """Have the attention of every forward of `model` go through `cache.attend`, see [`SharedPrefixCache`]."""
    with model._prefix_sharing.routed(), _set(_current_cache, cache):
        yield


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
    if shared_prefix is None:
        shared_prefix = _current_cache.get()
    if shared_prefix is not None:
        return shared_prefix.attend(base, module, query, key, value, attention_mask, **kwargs)
    return _base_attention(base, module)(module, query, key, value, attention_mask, **kwargs)


def _mask(base, *, mask_function, use_vmap=False, dtype=torch.float32, **kwargs):
    current_pass = _current_pass.get()
    if current_pass is None:
        if _current_cache.get() is not None and kwargs.get("allow_is_causal_skip", True):
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
    if base == "sdpa" and mask_function is causal_mask_function:
        slots = current_pass.prefix.slots
        if all(kernels_take(slots[layer, KEY], slots[layer, VALUE]) for layer in current_pass.prefix.sources.values()):
            return current_pass.no_mask
    return as_base_mask(base, current_pass.allowed(mask_function), dtype)


def as_base_mask(base: str, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if base == "sdpa":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


for _base in _BASE_IMPLEMENTATIONS:
    AttentionInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_attention, _base))
    AttentionMaskInterface.register(_IMPLEMENTATION_PREFIX + _base, functools.partial(_mask, _base))


def group_rows(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, group_size: int | None, multimodal: MultimodalInputs
) -> list[torch.Tensor]:
    """
    Indices of the rows that share a prompt and its images, one tensor a prompt, in the order in which the prompts
    appear. Rows share only within a block of `group_size` rows, so that two equal prompts stay two groups, as on the
    other processes.

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
    groups, with_text = [], {}
    for row, text in enumerate(group_of_row.tolist()):
        groups_with_text = with_text.setdefault(text, [])
        rows = next((rows for rows in groups_with_text if multimodal.same_images(row, rows[0])), None)
        if rows is None:
            rows = []
            groups.append(rows)
            groups_with_text.append(rows)
        rows.append(row)
    return [torch.tensor(rows, device=prompt_ids.device) for rows in groups]


def at_least_one(ids: torch.Tensor) -> torch.Tensor:
    # A prompt of one token has no prefix, but it takes a pass all the same, with any token. Processes that shard the
    # weights gather them together in every pass, so the number of passes must not depend on the data.
    return ids if len(ids) > 0 else ids.new_zeros(1)


def prompt_pass(
    forward: Callable,
    inputs: dict[str, torch.Tensor],
    positions: torch.Tensor,
    backbone: nn.Module,
    read_once: bool = False,
    **kwargs,
):
    """Run a prompt without its last token through a model. Returns the prefix that it leaves, and the output."""
    position_ids = rope_position_ids(backbone, inputs)
    prefix = SharedPrefix(positions, read_once=read_once)
    if position_ids is None:
        position_ids = at_least_one(positions)[None]
    else:
        prefix.offset = int(position_ids.max() - positions[-1])
    outputs = forward(
        **inputs,
        position_ids=position_ids,
        use_cache=False,
        shared_prefix=RecordPrefix(prefix),
        **kwargs,
    )
    return prefix, outputs


@dataclass(frozen=True)
class SharedPrefixPasses:
    """
    Each distinct prompt goes through the model once, then its completions in passes, packed without padding.

    The backward adds up the gradient of the prompt's keys and values before it goes through the prompt, once. Each
    pass of `completions_per_forward` but the last is checkpointed as a whole, so the activations of one pass are alive
    at a time. Without, the passes keep what the same completions keep in whole rows. So they do on the CPU with
    `activation_offloading` and gradient checkpointing.

    Args:
        prefix_length (`int`):
            Number of prompt columns, P.
        completions_per_forward (`int`, *optional*):
            Completions of a prompt that go through the model together. If `None`, all of them.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt. It fixes the number of prompts, which must be the same on
            all processes if they shard the weights. If `None`, all rows with the same prompt share it.
        num_images (`list[int]`, *optional*):
            Number of images of each row, if there are any.
        num_tiles (`list[int]`, *optional*):
            Number of tiles of each row, for models whose pixel values are indexed by tile.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether saved activations are offloaded to the CPU.
        open_prefix (`OpenPrefix`, *optional*):
            Prefix of the prompt of all rows, if its completions are spread over several micro-batches. Ignored without
            gradients and outside of a micro-batch.
    """

    prefix_length: int
    completions_per_forward: int | None = None
    group_size: int | None = None
    num_images: list[int] | None = None
    num_tiles: list[int] | None = None
    activation_offloading: bool = False
    open_prefix: OpenPrefix | None = None

    def forward(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
        **multimodal_inputs: torch.Tensor,
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
            **multimodal_inputs (`torch.Tensor`):
                Images of the prompts, and what the model takes for each token beside its id.

        Returns:
            [`PassesOutput`]: Hidden states, and the load-balancing loss.
        """
        # Passes are put together on the host, from one copy of the batch: whatever is read from a device waits for
        # all that it still has to compute
        host_ids, host_mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu()
        prompt_mask = host_mask[:, : self.prefix_length]
        multimodal = MultimodalInputs.of(multimodal_inputs, len(input_ids), self.num_images, self.num_tiles)
        multimodal.check(backbone, host_ids, host_mask, self.prefix_length)
        groups = group_rows(host_ids[:, : self.prefix_length], prompt_mask, self.group_size, multimodal)
        check_mask(host_mask)
        open_prefix = self.open_prefix if torch.is_grad_enabled() else None
        if open_prefix is not None and not open_prefix.is_entered:  # rows that are no part of a training step
            open_prefix = None
        if open_prefix is not None:
            open_prefix.check_prompt(host_ids[:, : self.prefix_length].masked_fill(prompt_mask == 0, -1), len(groups))
        if open_prefix is None or open_prefix.is_first:
            num_micro_batches = 1 if open_prefix is None else open_prefix.num_micro_batches
            share = multimodal_inputs or not self._sharing_saves_little(host_ids, host_mask, groups, num_micro_batches)
        else:
            share = open_prefix.has_prefix
        if not share:
            return self.forward_whole_rows(backbone, input_ids, attention_mask, output_router_logits)
        kwargs = {"output_router_logits": True} if output_router_logits else {}

        # A prompt that went through the model with an earlier micro-batch does not go again
        new_groups = [] if open_prefix is not None and open_prefix.has_prefix else groups
        # Positions are columns: the positions that a left-padded row has when it goes through the model by itself
        positions_of_group = [prompt_mask[rows[0], :-1].nonzero().squeeze(1) for rows in new_groups]
        has_token = host_mask[:, self.prefix_length - 1 :] != 0  # (B, C + 1)
        has_token[:, 0] = True  # the last prompt token
        passes = self.divide(groups, has_token, input_ids.device)
        # Of each token of a prompt or pass: row and column in the batch, completion in the pass and place in it
        places = []
        for rows, positions in zip(new_groups, positions_of_group, strict=True):
            columns = at_least_one(positions)
            places.append(torch.stack([rows[0].expand_as(columns), columns, columns, columns]))
        for _, rows in passes:
            row, column = has_token[rows].nonzero(as_tuple=True)
            place = has_token[rows].cumsum(1)[row, column] - 1
            places.append(torch.stack([rows[row], column + self.prefix_length - 1, row, place]))
        sizes = [x.shape[1] for x in places]
        places = torch.cat(places, dim=1).to(input_ids.device, non_blocking=True).split(sizes, dim=1)
        of_prompts, of_passes = places[: len(new_groups)], places[len(new_groups) :]

        prompts, ids = [], []
        for rows, (row, columns, _, _) in zip(new_groups, of_prompts, strict=True):
            prompts.append(multimodal.of_prefix(int(rows[0]), columns))
            prompt_ids = input_ids[row, columns]
            if multimodal.images[rows[0]]:  # the model looks for the places of the images among the tokens
                prompts[-1]["input_ids"] = prompt_ids[None]
            else:
                ids.append(prompt_ids[None])
        ids_of_passes = [input_ids[row, column][None] for row, column, _, _ in of_passes]
        # What later micro-batches read must outlive the backward of this one, and an offloading that ends with it
        keep_saved = nullcontext()
        if open_prefix is not None and self.activation_offloading:
            keep_saved = saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        if open_prefix is None:
            inputs = iter(pass_inputs(backbone, ids + ids_of_passes))
        else:
            with keep_saved:
                inputs_of_prompts = pass_inputs(backbone, ids) if ids else []
            inputs = iter(inputs_of_prompts + pass_inputs(backbone, ids_of_passes))
        shift = position_shift(backbone.config, input_ids.shape[1], self.prefix_length)

        prefixes = []
        numbers = [group for group, _ in passes]
        for group, prompt in enumerate(prompts):
            if "input_ids" not in prompt:
                prompt |= next(inputs)
            positions = of_prompts[group][1, : len(positions_of_group[group])] + shift
            read_once = numbers.count(group) == 1 and open_prefix is None
            with keep_saved:
                prefix, outputs = prompt_pass(backbone, prompt, positions, backbone, read_once, **kwargs)
            if missing := prefix.missing_layers(backbone.config.get_text_config()):
                raise ValueError(
                    f"Layers {missing} of {type(backbone).__name__} did not pass their keys and values to "
                    "`transformers.AttentionInterface`, or their states to the cache that they were called with, so "
                    "its prompts cannot be shared. Set `prefix_sharing=False`."
                )
            unshard_in_backward(backbone, prefix.layers())
            if output_router_logits and len(positions) > 0:
                prefix.write_router(router_sums(backbone, outputs.router_logits))
            prefixes.append(prefix)
        if open_prefix is not None:
            prefixes = [open_prefix.go_on(*prefixes)]
        else:
            for prefix in prefixes:
                prefix.lead_on()

        def forward_completions(context, model_inputs):
            with _set(_current_pass, context):
                outputs = backbone(
                    **model_inputs,
                    # Without a mask, restarting positions would be taken for a padding-free batch
                    attention_mask=torch.ones_like(context.positions)[None],
                    position_ids=context.positions[None] + context.prefix.offset,
                    use_cache=False,
                    shared_prefix=context,
                    **kwargs,
                )
            sums = router_sums(backbone, outputs.router_logits) if output_router_logits else None
            return outputs.last_hidden_state[0], sums

        contexts = [
            ReadPrefix.of(prefixes[group], column + shift, row, place, has_token[rows].sum(1).tolist())
            for (group, rows), (_, column, row, place) in zip(passes, of_passes, strict=True)
        ]
        arguments = list(zip(contexts, inputs, strict=True))
        outputs = run_passes(backbone, forward_completions, arguments, self.recompute, self.activation_offloading)
        all_rows, all_columns = [x[0] for x in of_passes], [x[1] - self.prefix_length + 1 for x in of_passes]
        last_hidden_state = completion_states([x for x, _ in outputs], all_rows, all_columns, has_token.shape)
        aux_loss = None
        if output_router_logits:
            # A prompt counts once for each of its rows
            sums = [
                [len(rows) * x for x in router]
                for rows, prefix in zip(groups, prefixes, strict=True)
                if (router := prefix.read_router()) is not None
            ]
            aux_loss = load_balancing_loss(sums + [pass_sums for _, pass_sums in outputs])
        return PassesOutput(last_hidden_state, aux_loss)

    @property
    def recompute(self) -> bool:
        """Whether passes are computed again in the backward."""
        return self.completions_per_forward is not None

    def _sharing_saves_little(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        groups: list[torch.Tensor],
        num_micro_batches: int,
    ) -> bool:
        # Only where one pass would hold all rows, and not with several processes: under FSDP, they must all call the
        # model equally often
        num_rows = len(input_ids)
        if (self.completions_per_forward or num_rows) < num_rows or has_several_processes():
            return False
        prefix_tokens = sum(attention_mask[rows[0], : self.prefix_length - 1].sum() for rows in groups)
        own_tokens = attention_mask[:, self.prefix_length :].sum() + num_rows
        # Other micro-batches of the prompt are taken to be like the first
        shared_tokens = prefix_tokens + num_micro_batches * own_tokens
        return bool(num_micro_batches * input_ids.numel() < _MIN_TOKEN_RATIO * shared_tokens)

    def forward_whole_rows(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
    ) -> PassesOutput:
        """[`~SharedPrefixPasses.forward`] without sharing: each completion goes through the model with its prompt."""
        return forward_together(backbone, input_ids, attention_mask, self.prefix_length, output_router_logits)

    def divide(
        self, groups: list[torch.Tensor], has_token: torch.Tensor, device: torch.device
    ) -> list[tuple[int, torch.Tensor]]:
        """
        Group and rows of each pass of completions, on the host.

        Args:
            groups (`list[torch.Tensor]`):
                Rows of each group.
            has_token (`torch.Tensor` of shape `(B, C + 1)`):
                Whether there is a token, from the last prompt token on.
            device (`torch.device`):
                Device that the passes run on.
        """
        passes = []
        for group, rows in enumerate(groups):
            passes.extend((group, chunk) for chunk in rows.split(self.completions_per_forward or len(rows)))
        return passes


class _Route:
    """
    Where the attention of a model goes while it is called with a shared prefix: to the function that can attend to it.
    The rest of the time its configs name the model's own implementation, which models and engines ask for.

    Hooks do so at the backbone, and at each attention: the backward computes layers again, behind the backbone's back.

    Args:
        configs (`list[PretrainedConfig]`):
            Configs of the text part.
    """

    def __init__(self, configs: list[PretrainedConfig]):
        self.configs = configs
        self.handles: list[RemovableHandle] = []
        self._running: set = set()  # what has not ended yet
        self._before: list[str] = []

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Route":
        # Of a multimodal model, that of the text part: towers keep theirs
        text_config = model.config.get_text_config()
        implementation = _IMPLEMENTATION_PREFIX + text_config._attn_implementation
        parts = {
            name: implementation for name in model.config.sub_configs if getattr(model.config, name) is text_config
        }
        configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        for config in configs:  # which grows
            parts_of_config = (getattr(config, name) for name in config.sub_configs)
            configs.extend(part for part in parts_of_config if part is not None)
        before = {id(config): (config, config._attn_implementation) for config in configs}
        model.set_attn_implementation({"": implementation, **parts})
        routed = [config for config, _ in before.values() if config._attn_implementation == implementation]
        for config in routed:
            config._attn_implementation_internal = before[id(config)][1]
        return cls(routed)

    def install(self, backbone: nn.Module) -> None:
        attention = [module for module in backbone.modules() if getattr(module, "layer_idx", None) is not None]
        for module in [backbone, *attention]:
            self.handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self._end(*self._running)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Go there whatever the model is called with."""
        self._begin(self)
        try:
            yield
        finally:
            self._end(self)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("shared_prefix") is not None:
            self._begin(module)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output) -> None:
        self._end(module)

    def _begin(self, what) -> None:
        if not self._running:
            self._before = [config._attn_implementation for config in self.configs]
            for config, own in zip(self.configs, self._before, strict=True):
                config._attn_implementation_internal = _IMPLEMENTATION_PREFIX + own.removeprefix(
                    _IMPLEMENTATION_PREFIX
                )
        self._running.add(what)

    def _end(self, *what) -> None:
        if self._running and not (self._running - set(what)):
            for config, own in zip(self.configs, self._before, strict=True):
                config._attn_implementation_internal = own
        self._running.difference_update(what)


def enable_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Let `model` attend to a shared prefix: a call with one goes to a function that can, any other to the attention that
    the model was loaded with. What was enabled before is checked again. [`disable_prefix_sharing`] undoes it.

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
        adapter = vars(model.active_peft_config)
        if adapter.get("alora_invocation_tokens") is not None:
            refuse("aLoRA looks for its tokens in whole sequences. Set `prefix_sharing=False`.")
        # Dropout that has layers is asked for there: `disable_dropout` may have switched it off
        parts_of_names = {part for name, _ in model.named_modules() for part in name.split(".")}
        for name, p in adapter.items():
            if "dropout" in name and isinstance(p, float) and p > 0 and name not in parts_of_names:
                refuse(f"the completions of a prompt would share the adapter's dropout. Set its `{name}` ({p}) to 0.")
        model = model.get_base_model()
    disable_prefix_sharing(model)
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation

    if model.config.is_encoder_decoder or getattr(text_config, "cross_attention_layers", None):
        refuse("only decoders without cross-attention can share a prompt. Set `prefix_sharing=False`.")
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    mixers = find_mixers(model)
    attending, with_state = layers_by_kind(text_config)
    if layer_types - SUPPORTED_LAYER_TYPES or not attending or {mixer.layer_idx for mixer in mixers} != with_state:
        unsupported = sorted(layer_types - {"full_attention", "sliding_attention"})
        refuse(f"it has layers of type {unsupported}, whose state cannot be shared. Set `prefix_sharing=False`.")
    # transformers does not say so of models with a state. The comparison below finds attention that does not.
    if not (model._supports_attention_backend or mixers):
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
        for p in (getattr(module, attribute, None) for attribute in _DROPOUTS):
            if isinstance(p, float) and p > 0:
                refuse(
                    f"the completions of a prompt would share its dropout (that of `{name}` is {p}). Set "
                    "`disable_dropout=True`, or for adapters `lora_dropout=0.0`."
                )
    route = _Route.of(model)
    route.install(model.base_model)
    route.handles.extend(share_states(mixers))
    model._prefix_sharing = route
    try:
        _compare(model, mixers, refuse)
    except BaseException:
        disable_prefix_sharing(model)
        raise


def _compare(model: PreTrainedModel, mixers: list[nn.Module], refuse: Callable[[str], None]) -> None:
    """Try a shared prefix on a few tokens."""
    try:
        error = error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH), training=True)
    except Exception as exception:
        if isinstance(exception, torch.OutOfMemoryError) or "CUDA error" in str(exception):
            raise  # the device's fault, not the model's
        refuse(f"a shared prompt fails in it ({type(exception).__name__}: {exception}). Set `prefix_sharing=False`.")
    if error > 0:
        refuse(
            f"hidden states behind a shared prompt differ from those of whole sequences by {error:.1%} (in training, "
            "where noise counts, too). Set `prefix_sharing=False`."
        )
    hidden_size = model.config.get_text_config().hidden_size
    for mixer in {type(mixer): mixer for mixer in mixers}.values():
        if ignores_state(mixer, SharedPrefix(torch.arange(2)), hidden_size):
            refuse(f"{type(mixer).__name__} does not start from the state of a prompt. Set `prefix_sharing=False`.")


def disable_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Take back what [`enable_prefix_sharing`] did, if it did.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.
    """
    if is_peft_model(model):
        model = model.get_base_model()
    route = vars(model).pop("_prefix_sharing", None)
    if route is not None:
        route.remove()
