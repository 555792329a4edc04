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
from .fsdp2 import FSDPModule, base_model_forward
from .images import MultimodalInputs
from .nodes import Path
from .passes import exceeds_longrope, has_several_processes, on_any_process
from .routing import running
from .shared_passes import at_least_one, prompt_pass, prompts_of
from .tree import Branch, Tree, common_length

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
    Compute what prompts begin with and each distinct prompt once, without its last token: `forward` is that of the
    whole model, `positions` of shape `(B, P)` are those that `generate` continues. The cache has the only reference to
    the keys and values.
    """
    tree = _tree_of(backbone, input_ids, attention_mask, positions, group_size, multimodal)
    starts = (input_ids.shape[1] - tree.prompts.lengths).tolist()
    paths: dict[Branch, Path] = {}
    for branch in tree.branches:
        row, parent = branch.rows[0], paths.get(branch.parent)
        columns = torch.arange(starts[row] + branch.start, starts[row] + branch.end, device=input_ids.device)
        inputs = {"input_ids": at_least_one(input_ids[row, columns])[None]}
        inputs |= multimodal.of_tokens(row, at_least_one(columns))
        if tree.branch_of[row] is branch:
            inputs |= multimodal.images[row]
        node, _ = prompt_pass(forward, inputs, positions[row, columns], backbone, parent, logits_to_keep=1)
        paths[branch] = Path.of(*(() if parent is None else parent.nodes), node)
    ends = [branch for branch in tree.branches if tree.branch_of[branch.rows[0]] is branch]
    groups = [torch.tensor(branch.rows, device=input_ids.device) for branch in ends]
    return SharedPrefixCache([paths[branch] for branch in ends], groups, attention_mask.shape[1] - 1)


def _tree_of(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
    group_size: int | None,
    multimodal: MultimodalInputs,
) -> Tree:
    """The tree of prompts, with a branch for each distinct one."""
    starts = positions.gather(1, (attention_mask != 0).int().argmax(1, keepdim=True))
    begin_alike = not (starts != starts[0]).any()  # columns are positions in some models
    prompts = prompts_of(backbone, input_ids.cpu(), attention_mask.cpu(), multimodal, begin_alike)
    sharded = is_deepspeed_zero3_enabled() or any(isinstance(module, FSDPModule) for module in backbone.modules())
    if not (sharded and has_several_processes()):
        return Tree.of(prompts, every_prompt=True)
    # Processes that gather weights together have equally many branches, also where prompts of a group differ on one
    size = group_size or 1
    differ = any((keys != keys[0]).any() for keys in prompts.keys.split(size))
    length = common_length(prompts, size)
    differ, is_without = on_any_process([differ, length == 0], input_ids.device)
    return Tree.of_groups(prompts, 1 if differ else size, 0 if is_without else length)


def _check_options(of_model: GenerationConfig, generation_config: GenerationConfig) -> None:
    for option, supported in _SUPPORTED_OPTIONS.items():  # what the generation config leaves open, the model's decides
        value = getattr(of_model, option)
        if getattr(generation_config, option) is None and value not in supported:
            raise ValueError(
                f"`prefix_sharing=True` decodes greedily or by sampling, with its own cache, and does not support "
                f"`{option}={value!r}` in the model's generation config. Remove it there, or generate with vLLM."
            )


def _positions_to_continue(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Positions without padding, as `generate` continues them. Some models do not take them and count columns."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = model.prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, position_ids=positions)
    if inputs.get("position_ids") is not None:
        return positions
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


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
    _check_options(model.generation_config, generation_config)
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
    positions = _positions_to_continue(base_model, input_ids, attention_mask)
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
