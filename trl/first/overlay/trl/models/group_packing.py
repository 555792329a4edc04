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
Prefix sharing: the completions of a prompt go through the model in one row behind it, so that it is computed once.

Shapes: B rows, P prompt columns, C completion columns, G packed rows, N tokens of a packed row, H hidden size.
"""

from contextlib import nullcontext

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import BaseModelOutput


def pack_groups(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, prefix_length: int
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """
    Put rows with the same prompt that follow one another in one row: the prompt, then completion after completion.

    Positions are columns, which are those of the rows by themselves. A token sees the prompt and, of the completions,
    its own. Scores between completions are computed and thrown away, so that less is gained with long completions of a
    short prompt. The mask takes `G * N**2` bytes, and in each layer `sdpa` copies it to the dtype of the queries.

    Args:
        input_ids (`torch.Tensor` of shape `(B, P + C)`):
            Left-padded prompts followed by right-padded completions.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding.
        prefix_length (`int`):
            Number of prompt columns, P.

    Returns:
        `tuple`:
            - inputs of the model: `input_ids` and `position_ids` of shape `(G, N)`, and a boolean `attention_mask` of
              shape `(G, 1, N, N)`
            - packed row and place, of shape `(B, C + 1)` each, of the last prompt token and the completion of each row

    Raises:
        ValueError: If a prompt has no token, or the attention mask of a row is 0 between tokens.
    """
    if not attention_mask[:, prefix_length - 1].all():
        row = int(attention_mask[:, prefix_length - 1].argmin())
        raise ValueError(f"The prompt of row {row} of the batch is empty. Remove empty prompts from the dataset.")
    starts = attention_mask.diff(dim=1, prepend=torch.zeros_like(attention_mask[:, :1])) > 0
    if (starts.sum(1) > 1).any():
        row = int(starts.sum(1).argmax())
        raise ValueError(
            f"The attention mask of row {row} of the batch is 0 between tokens. To train on some tokens of a "
            "completion only, leave its attention mask at 1 and mask the loss."
        )
    device = input_ids.device
    prompts = input_ids[:, :prefix_length].masked_fill(attention_mask[:, :prefix_length] == 0, -1)
    _, group, sizes = torch.unique_consecutive(prompts, dim=0, return_inverse=True, return_counts=True)
    first = (sizes.cumsum(0) - sizes)[group]  # row that brings the prompt of each row
    rows = torch.arange(len(input_ids), device=device)

    brings = attention_mask.bool()  # whether a token goes into the packed row
    brings[:, :prefix_length] &= (first == rows)[:, None]
    end = brings.sum(1).cumsum(0)
    start = end - brings.sum(1)
    places = (start - start[first])[:, None] + brings.cumsum(1) - 1
    row, column = brings.nonzero(as_tuple=True)
    packed_row, place = group[row], places[row, column]

    shape = (len(sizes), int(place.max()) + 1)
    packed_ids, position_ids = input_ids.new_zeros(shape), input_ids.new_zeros(shape)
    packed_ids[packed_row, place], position_ids[packed_row, place] = input_ids[row, column], column
    # Completion of each token, -1 in the prompt and -2 in the padding
    completion = input_ids.new_full(shape, -2)
    completion[packed_row, place] = torch.where(column < prefix_length, -1, row)
    # In place: a second mask of N tokens by N would double the peak
    sees = (completion[:, :, None] == completion[:, None, :]).logical_or_(completion[:, None, :] == -1).tril_()
    inputs = {"input_ids": packed_ids, "attention_mask": sees[:, None], "position_ids": position_ids}
    places = torch.cat([places[first, prefix_length - 1 : prefix_length], places[:, prefix_length:]], dim=1)
    return inputs, (group[:, None], places)


def shared_forward(
    backbone: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, prefix_length: int, **kwargs
) -> BaseModelOutput:
    """
    Hidden states of completions, with each prompt computed once.

    Args:
        backbone ([`~transformers.PreTrainedModel`]):
            Model without its LM head.
        input_ids (`torch.Tensor` of shape `(B, P + C)`):
            Left-padded prompts followed by right-padded completions.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding.
        prefix_length (`int`):
            Number of prompt columns, P.
        **kwargs:
            Further keyword arguments of the backbone.

    Returns:
        [`~transformers.modeling_outputs.BaseModelOutput`]: Hidden states of the last prompt token and the completion
        of each row, of shape `(B, C + 1, H)`.
    """
    inputs, places = pack_groups(input_ids, attention_mask, prefix_length)
    hidden_states = backbone(**inputs, **kwargs).last_hidden_state
    # With the model split across devices (`device_map`), the backbone can end on another device
    row, place = (x.to(hidden_states.device) for x in places)
    return BaseModelOutput(hidden_states[row, place])


def check_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Check that `model` computes the same for completions behind a shared prompt as for whole rows.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.

    Raises:
        ValueError: If it does not, or if its attention does not take the mask.
    """
    if is_peft_model(model):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError("`prefix_sharing=True` does not support adapters that put learned tokens before rows.")
        model = model.get_base_model()
    refusal = f"`prefix_sharing=True` does not support {type(model).__name__}: "
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        raise ValueError(
            f"{refusal}its attention implementation is {config._attn_implementation!r}, which does not take the mask "
            "of a shared prompt. Load the model with `attn_implementation='sdpa'`."
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding_window = getattr(config, "sliding_window", None)
    if layer_types != {"full_attention"} or sliding_window is not None:
        raise ValueError(
            f"{refusal}not all of its layers attend to the whole sequence ({sorted(layer_types)}, sliding window "
            f"{sliding_window}). Set `prefix_sharing=False`."
        )
    # Adapters, whose output is zero before the first update, would hide theirs from the comparison below
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise ValueError(f"{refusal}it has dropout. Set `disable_dropout=True`, or for adapters `lora_dropout=0.0`.")
    if any(param.is_meta for param in model.parameters()):  # with FSDP, the first process has the weights and checks
        return
    gather_ctx = nullcontext()
    if is_deepspeed_zero3_enabled():
        import deepspeed

        gather_ctx = deepspeed.zero.GatheredParameters(list(model.parameters()))
    # Two rows of one prompt, with left and right padding, in training mode, where attention may have dropout
    device = model.get_input_embeddings().weight.device
    input_ids = torch.arange(18, device=device).view(2, 9) % config.vocab_size
    input_ids[1, :5] = input_ids[0, :5]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[:, 0] = attention_mask[1, -1] = 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    training = model.training
    try:
        with gather_ctx, torch.no_grad():
            model.train()
            shared = shared_forward(model.base_model, prefix_length=5, **inputs).last_hidden_state
            whole = model.base_model(**inputs)
    finally:
        model.train(training)
    is_token = attention_mask[:, 4:].bool().to(shared.device)
    shared, whole = shared[is_token].float(), whole.last_hidden_state[:, 4:][is_token].float()
    error = ((shared - whole).norm() / whole.norm()).item()
    if not error <= torch.finfo(model.dtype).eps ** 0.5:
        raise ValueError(
            f"{refusal}hidden states behind a shared prompt differ from those of whole rows by {error:.1%}, as with "
            'dropout of attention (`model_init_kwargs={"attention_dropout": 0.0}`). Set `prefix_sharing=False`.'
        )
