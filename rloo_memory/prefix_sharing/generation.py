"""
Generation with shared prompts: each goes through the model once for all its completions.

Shape suffixes: B rows, P prompt columns, C completion columns.
"""

from collections.abc import Callable

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .cache import SharedPrefixCache
from .common_start import common_length, first_tokens
from .routing import running
from .fsdp2 import FSDPModule, base_model_forward
from .images import MultimodalInputs
from .passes import exceeds_longrope, has_several_processes
from .shared_passes import at_least_one, group_rows, prompt_pass


# Options of generation with several forwards a token, or another cache, and their values without that. What older
# checkpoints call "hybrid" is the default cache
_SUPPORTED_OPTIONS = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "cache_implementation": (None, "hybrid"),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}


def prefill(
    forward: Callable,
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
    group_size: int | None,
    multimodal: MultimodalInputs,
) -> SharedPrefixCache:
    """
    Compute each distinct prompt once, without its last token: `forward` is that of the whole model, `positions` of shape
    `(B, P)` are those that `generate` continues. The cache has the only reference to the keys and values.
    """
    groups = group_rows(input_ids, attention_mask, group_size, multimodal)
    sharded = is_deepspeed_zero3_enabled() or any(isinstance(module, FSDPModule) for module in backbone.modules())
    if sharded and group_size is not None and has_several_processes():
        # Processes that gather weights together have equally many prompts, also where those of a group differ on one
        differ = torch.tensor(int(len(groups) * group_size > len(input_ids)), device=input_ids.device)
        torch.distributed.all_reduce(differ, torch.distributed.ReduceOp.MAX)
        if differ:
            groups = group_rows(input_ids, attention_mask, 1, multimodal)
    length = _common_length(backbone, input_ids, attention_mask, positions, groups, multimodal, sharded)
    prefixes, start = [], None
    if length > 0:
        columns = attention_mask[0].nonzero().squeeze(1)[:length]
        inputs = {"input_ids": input_ids[0, columns][None], **multimodal.of_tokens(0, columns)}
        start, _ = prompt_pass(forward, inputs, positions[0, columns], backbone, logits_to_keep=1)
    for rows in groups:
        columns = attention_mask[rows[0], :-1].nonzero().squeeze(1)[length:]
        inputs = {"input_ids": at_least_one(input_ids[rows[0], columns])[None]}
        inputs |= multimodal.of_prefix(rows[0], at_least_one(columns))
        of_prompt = positions[rows[0], columns]
        prefixes.append(prompt_pass(forward, inputs, of_prompt, backbone, parent=start, logits_to_keep=1)[0])
    return SharedPrefixCache(prefixes, groups, attention_mask.shape[1] - 1)


def _common_length(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
    groups: list[torch.Tensor],
    multimodal: MultimodalInputs,
    sharded: bool,
) -> int:
    """Number of tokens that all prompts begin with, which go through the model once, 0 if they do not."""
    length = 0
    if backbone._prefix_sharing.shares_starts and len(groups) > 1 and multimodal.take_common_start(backbone):
        length = common_length(input_ids, attention_mask, getattr(backbone.config, "image_token_id", None))
    if length > 0:
        starts = first_tokens(positions, attention_mask, 1)
        if (starts != starts[0]).any():  # columns are positions in some models
            length = 0
    if sharded and has_several_processes():  # they gather weights together
        least = torch.tensor(length, device=input_ids.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        length = length if least > 0 else 0
    return length


def generate_with_shared_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    generation_config: GenerationConfig,
    group_size: int | None = None,
    num_images: list[int] | None = None,
    num_tiles: list[int] | None = None,
    **multimodal_inputs: torch.Tensor,
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
        num_images (`list[int]`, *optional*):
            Number of images of each row, if there are any.
        num_tiles (`list[int]`, *optional*):
            Number of tiles of each row, for models whose pixel values are indexed by tile.
        **multimodal_inputs (`torch.Tensor`):
            Images of the prompts, and what the model takes for each token beside its id.

    Returns:
        `torch.Tensor` of shape `(B, P + C)`: Prompts followed by what was generated.
    """
    for option, supported in _SUPPORTED_OPTIONS.items():  # what the generation config leaves open, the model's decides
        value = getattr(model.generation_config, option)
        if getattr(generation_config, option) is None and value not in supported:
            raise ValueError(
                f"`prefix_sharing=True` decodes greedily or by sampling, with its own cache, and does not support "
                f"`{option}={value!r}` in the model's generation config. Remove it there, or generate with vLLM."
            )
    length = generation_config.max_length
    if generation_config.max_new_tokens is not None:
        length = input_ids.shape[1] + generation_config.max_new_tokens
    # Where frequencies change on the way, `generate` computes all keys and values again
    if exceeds_longrope(model.config, length):
        return model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            **multimodal_inputs,
        )
    # As `generate` of a PEFT model does, past the forward of the PEFT model, which Accelerate wraps in autocast
    forward = base_model_forward(model) if is_peft_model(model) else model
    base_model = model.get_base_model() if is_peft_model(model) else model
    multimodal = MultimodalInputs.of(multimodal_inputs, len(input_ids), num_images, num_tiles)
    multimodal.check(base_model.base_model, input_ids, attention_mask, prefix_length=input_ids.shape[1])
    # Positions without padding, as `generate` continues them. Some models do not take them and count columns.
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = base_model.prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, position_ids=positions)
    if inputs.get("position_ids") is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    cache = prefill(forward, base_model.base_model, input_ids, attention_mask, positions, group_size, multimodal)
    with running(cache, base_model.base_model._prefix_sharing.configs):
        return model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions + cache.offsets,
            generation_config=generation_config,
            past_key_values=cache,
            use_cache=True,  # whatever the generation config says: without the cache there is no prefix
        )
