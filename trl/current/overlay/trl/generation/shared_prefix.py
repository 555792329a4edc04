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
Generation with shared prompts: the keys and values of a prompt are computed and stored once for all its completions.

Shape suffixes: B rows, P prompt columns, C completion columns, S prefix tokens, N rows that share a prompt, D head
size.
"""

from collections.abc import Callable

import torch
from accelerate.utils import is_peft_model
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..models.passes import exceeds_longrope
from ..models.prefix_sharing import (
    SharedPrefix,
    as_base_mask,
    at_least_one,
    attend_to_cache,
    group_rows,
    masked_attention,
    prompt_pass,
    use_base_attention,
)


# Room for new keys grows by as many steps as there are, so that copying is cheap, and by no fewer than this many
_MIN_NEW_STEPS = 64

# The layers of a step share one mask, or two where some of them slide
_MASKS_PER_STEP = 2


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
                extra = max(_MIN_NEW_STEPS, self.num_steps) * len(rows)
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
    Cache for decoding several completions of a prompt, with the prompt's keys and values stored once. Made by
    [`prefill`].

    Args:
        prefixes (`list[SharedPrefix]`):
            Prefix of each group.
        groups (`list[torch.Tensor]`):
            Rows of each group.
        prefix_mask (`torch.Tensor` of shape `(B, P - 1)`):
            1 for prefix tokens, 0 for padding.
    """

    def __init__(self, prefixes: list[SharedPrefix], groups: list[torch.Tensor], prefix_mask: torch.Tensor):
        self.groups = groups
        self.row_order = torch.cat(groups).argsort()
        self.prefix_length = prefix_mask.shape[1]
        self.prefix_columns = [prefix_mask[rows[0]].nonzero().squeeze(1) for rows in groups]
        self.sources = prefixes[0].sources
        layers = {
            layer_idx: _SharedPrefixLayer(
                [prefix.layers[layer_idx] for prefix in prefixes], groups, self.prefix_length
            )
            for layer_idx in prefixes[0].layers
        }
        super().__init__(layers=[layers[self.sources[layer_idx]] for layer_idx in range(len(self.sources))])
        self._masks = []

    def _group_masks(self, base: str, attention_mask: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        # Each mask is laid out for the groups once
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
            masks.append(as_base_mask(base, group_mask, dtype))
        if len(self._masks) == _MASKS_PER_STEP:
            self._masks.pop(0)
        self._masks.append((attention_mask, masks))
        return masks

    def attend(self, base, module, query, key, value, attention_mask, **kwargs):
        layer = self.layers[module.layer_idx]
        if self.sources[module.layer_idx] == module.layer_idx:
            layer.append(key, value)
        masks = self._group_masks(base, attention_mask, query.dtype)
        group_outputs = []
        for group, rows in enumerate(self.groups):
            group_query = query[rows].transpose(0, 2)  # (1, num_heads, N, D)
            group_output, _ = masked_attention(base, module, group_query, *layer.read(group), masks[group], **kwargs)
            group_outputs.append(group_output.transpose(0, 1))
        # Autocast may have attended in another dtype than that of the query
        return torch.cat(group_outputs)[self.row_order], None


def prefill(
    forward: Callable, input_ids: torch.Tensor, attention_mask: torch.Tensor, group_size: int | None = None
) -> SharedPrefixCache:
    """
    Compute each distinct prompt once, without its last token.

    Args:
        forward (`Callable`):
            Forward of a model prepared by [`enable_prefix_sharing`].
        input_ids (`torch.Tensor` of shape `(B, P)`):
            Left-padded prompts.
        attention_mask (`torch.Tensor` of shape `(B, P)`):
            1 for tokens, 0 for padding.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt, see [`SharedPrefixPasses`].

    Returns:
        [`SharedPrefixCache`]: The only reference to the keys and values, which go when the cache has copied them.
    """
    groups = group_rows(input_ids, attention_mask, group_size)
    prefixes = []
    for rows in groups:
        prefix_ids = input_ids[rows[0], :-1][attention_mask[rows[0], :-1].bool()]
        # Positions without padding, as `generate` continues them
        positions = torch.arange(len(prefix_ids), device=prefix_ids.device)
        inputs = {"input_ids": at_least_one(prefix_ids)[None]}
        prefixes.append(prompt_pass(forward, inputs, positions, logits_to_keep=1)[0])
    return SharedPrefixCache(prefixes, groups, attention_mask[:, :-1])


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
            Number of consecutive rows with the same prompt, see [`SharedPrefixPasses`].

    Returns:
        `torch.Tensor` of shape `(B, P + C)`: Prompts followed by what was generated.
    """
    # Where frequencies change on the way, `generate` computes all keys and values again
    if exceeds_longrope(model.config, input_ids.shape[1] + generation_config.max_new_tokens):
        with use_base_attention(model):
            return model.generate(
                input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config
            )
    # As `generate` of a PEFT model does, past the forward of the PEFT model, which Accelerate wraps in autocast
    forward = model.get_base_model() if is_peft_model(model) else model
    cache = prefill(forward, input_ids, attention_mask, group_size)
    with attend_to_cache(cache):
        return model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            past_key_values=cache,
            use_cache=True,  # whatever the generation config says: without the cache there is no prefix
        )
