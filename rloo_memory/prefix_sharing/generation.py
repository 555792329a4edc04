"""
Generation with shared prompts: each goes through the model once for all its completions.

Shape suffixes: B rows, P prompt columns, C completion columns.
"""

import copy
import inspect
from collections.abc import Callable

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .cache import SharedPrefixCache
from .fsdp2 import base_model_forward
from .images import MultimodalInputs
from .lm_head import causal_lm_of
from .nodes import Path
from .passes import GoesWhole, gather_together, on_any_process, on_any_that_gathers, position_shift
from .routing import running
from .shared_passes import at_least_one, prompt_pass, prompts_of
from .states import cache_argument
from .tree import Branch, Prompts, Tree, common_length

# Options of decoding one completion a row, with a cache, and their values for that. What older checkpoints call
# "hybrid" is the default cache
_OPTIONS = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "cache_implementation": (None, "dynamic", "hybrid"),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
}
_OTHER_WAYS = ("assistant_model", "cache", "custom_generate", "negative_prompt_ids", "past_key_values", "position_ids")
_ARGUMENTS = inspect.signature(GenerationMixin.generate).parameters.keys() | vars(GenerationConfig()).keys()


def prefill(
    forward: Callable,
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
    group_size: int,
    multimodal: MultimodalInputs,
) -> SharedPrefixCache:
    """
    Compute what prompts begin with and each distinct prompt once, without its last token: `forward` is that of the
    whole model, `positions` of shape `(B, P)` are those that `generate` continues. The cache has the only reference to
    the keys and values.
    """
    first_positions = positions.gather(1, (attention_mask != 0).int().argmax(1, keepdim=True))
    begin_alike = not (first_positions != first_positions[0]).any()  # columns are positions in some models
    prompts = prompts_of(backbone, input_ids.cpu(), attention_mask.cpu(), multimodal, begin_alike)
    tree = _tree_of(backbone, prompts, group_size, input_ids.device)
    starts = (input_ids.shape[1] - tree.prompts.lengths).tolist()
    paths: dict[Branch, Path] = {}
    for branch in tree.branches:
        row, parent = branch.rows[0], None if branch.parent is None else paths[branch.parent]
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


def _tree_of(backbone: nn.Module, prompts: Prompts, group_size: int, device: torch.device) -> Tree:
    """The tree of prompts, with a branch for each distinct one."""
    if not gather_together(backbone):
        return Tree.of(prompts, every_prompt=True)
    # Processes that gather weights together have equally many branches, also where prompts of a group differ on one
    differ = any((keys != keys[0]).any() for keys in prompts.keys.split(group_size))
    length = common_length(prompts, group_size)
    differ, is_without = on_any_process([differ, length == 0], device)
    return Tree.of_groups(prompts, 1 if differ else group_size, 0 if is_without else length)


def _option(model: PreTrainedModel, inputs: dict, name: str):
    """What is asked for; what a call leaves open, its generation config decides, and then the model's."""
    configs = [inputs.get("generation_config"), model.generation_config]
    values = [inputs.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in values if value is not None), None)


def _check(model: PreTrainedModel, inputs: dict) -> None:
    """Raise a [`GoesWhole`] where `generate` does not share prompts if it is called with these arguments."""
    for name, plain in _OPTIONS.items():
        if (value := _option(model, inputs, name)) not in plain:
            raise GoesWhole(
                f"with `{name}={value!r}`, it does not decode one completion a row. Remove it, or generate with vLLM."
            )
    if given := [name for name in _OTHER_WAYS if inputs.get(name) is not None]:
        raise GoesWhole(f"with `{given[0]}`, it does not begin with the prompts. Remove it.")
    if missing := [name for name in ("input_ids", "attention_mask") if inputs.get(name) is None]:
        raise GoesWhole(f"it was called without `{missing[0]}`. Pass it.")


def _changes_frequencies(model: PreTrainedModel, inputs: dict) -> bool:
    """Whether `generate` computes all keys and values again on the way, with other frequencies (`longrope`)."""
    new, length = (_option(model, inputs, name) for name in ("max_new_tokens", "max_length"))
    return position_shift(model.config, length if new is None else inputs["input_ids"].shape[1] + new) > 0


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
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    group_size: int = 1,
    num_images: list[int] | None = None,
    num_tiles: list[int] | None = None,
    **inputs,
) -> torch.Tensor:
    """
    [`~transformers.GenerationMixin.generate`], computing and storing each distinct prompt once: of left-padded prompts
    `(B, P)`, of which `group_size` consecutive ones are the same. `inputs` are images, of so many a row, what a model
    takes for each token beside its id, and arguments of `generate`. Raises a [`GoesWhole`] if rows are not decoded one
    completion each, or images cannot be shared.
    """
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "generation_config": generation_config}
    asked = {**given, **inputs}
    _check(model, asked)
    assert input_ids is not None
    if on_any_that_gathers(_changes_frequencies(model, asked), model, input_ids.device):
        return model.generate(**asked)
    # As `generate` of a PEFT model does, past the forward of the PEFT model, which Accelerate wraps in autocast
    forward = base_model_forward(model) if is_peft_model(model) else model
    causal_lm = causal_lm_of(model)
    backbone = causal_lm.base_model
    options = {name: inputs.pop(name) for name in _ARGUMENTS & inputs.keys()}
    multimodal = MultimodalInputs.of(inputs, len(input_ids), num_images, num_tiles)
    multimodal.check(backbone, input_ids, attention_mask, prefix_length=input_ids.shape[1])
    positions = _positions_to_continue(causal_lm, input_ids, attention_mask)
    cache = prefill(forward, backbone, input_ids, attention_mask, positions, group_size, multimodal)
    # Whatever was asked for: without the cache there is no prefix
    options["use_cache"] = True
    if generation_config is not None:
        generation_config = copy.copy(generation_config)
        generation_config.use_cache = options.pop("use_cache")
    with running(cache, backbone._prefix_sharing.configs):
        return model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions + cache.offsets,
            generation_config=generation_config,
            **{cache_argument(causal_lm): cache},
            **options,
        )
