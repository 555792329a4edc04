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
Passes: the rows of a batch go through a model in parts, and the activations of one part are alive at a time.

A pass is what goes through the model together: a prompt, some completions of a prompt, or some whole rows.

Shape suffixes: B rows, P prompt columns, C completion columns, T tokens of a pass, H hidden size.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from .prefix_sharing_zero3 import layers_alone_recompute


def has_several_processes() -> bool:
    """Whether other processes train beside this one. vLLM in the trainer's process initializes a group of one."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host. On CUDA the host does not wait for it, for which it has to lie in pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)


@dataclass(frozen=True)
class PassesOutput:
    """
    Output of a backbone whose rows went through it in passes.

    Args:
        last_hidden_state (`torch.Tensor` of shape `(B, C + 1, H)`):
            Hidden states from the last prompt token on. Zero where the token is padding, unless all rows went
            together.
        aux_loss (`torch.Tensor`, *optional*):
            MoE load-balancing loss over the tokens of all rows, prompts included, when router logits are requested.
    """

    last_hidden_state: torch.Tensor
    aux_loss: torch.Tensor | None = None


def run_passes(
    backbone: nn.Module, forward: Callable, arguments: list[tuple], recompute: bool, activation_offloading: bool
) -> list[tuple]:
    """
    Output of `forward` for the arguments of each pass. With `recompute`, one pass keeps activations at a time, unless
    those of all passes are checkpointed by layer and offloaded.
    """
    # Checkpointed layers leave their inputs for the backward, which take less of the CPU's memory than those of whole
    # rows. Layers that are not would leave all that they save, many times as much.
    offloaded = activation_offloading and backbone.is_gradient_checkpointing
    recompute = recompute and torch.is_grad_enabled() and not offloaded and not layers_alone_recompute(backbone)
    outputs = []
    for i, args in enumerate(arguments):
        if recompute and i < len(arguments) - 1:
            outputs.append(checkpoint(forward, *args, use_reentrant=False))
        else:  # the first to be needed by the backward, so its activations can stay
            outputs.append(forward(*args))
    return outputs


def forward_together(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prefix_length: int,
    output_router_logits: bool = False,
) -> PassesOutput:
    """Hidden states of completions whose rows, each with its prompt, go through the backbone in one pass."""
    kwargs = {"output_router_logits": True} if output_router_logits else {}
    outputs = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
    aux_loss = None
    if output_router_logits:
        aux_loss = load_balancing_loss([router_sums(backbone, outputs.router_logits, attention_mask)])
    return PassesOutput(outputs.last_hidden_state[:, prefix_length - 1 :], aux_loss)


def check_mask(attention_mask: torch.Tensor) -> None:
    """
    Args:
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding, on the host.

    Raises:
        ValueError: If the tokens of a row do not follow one another. Only these go through the model, but a token
            behind a masked one is scored from what the model makes of the masked one.
    """
    starts = nn.functional.pad(attention_mask, (1, 0)).diff(dim=1) > 0
    rows = (starts.sum(1) > 1).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"The attention mask of row {rows[0]} of the batch is 0 between tokens (at column "
            f"{starts[rows[0]].nonzero()[1].item() - 1}), and rows that go through the model in passes must have their "
            "padding around them. To train on some tokens of a completion only, leave its attention mask at 1 and mask "
            "the loss, or set `prefix_sharing=False` and `tokens_per_forward=None`."
        )


def pass_inputs(backbone: nn.Module, ids: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """
    Inputs of each pass from its token ids. If the embedding is trained, the tokens of all passes are looked up
    together: the gradient of a lookup has the size of the whole vocabulary.
    """
    embedding = backbone.get_input_embeddings()
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in embedding.parameters()):
        return [{"input_ids": x} for x in ids]
    all_ids = torch.cat([x.flatten() for x in ids])
    embeds = {"inputs_embeds": embedding(all_ids)}
    # Gemma 3n and Gemma 4 look tokens up once more for each layer
    if getattr(backbone.config.get_text_config(), "hidden_size_per_layer_input", None):
        embeds["per_layer_inputs"] = backbone.get_decoder().get_per_layer_inputs(all_ids)
    per_pass = {name: x.split([y.numel() for y in ids]) for name, x in embeds.items()}
    return [{name: x[i].view(*y.shape, *x[i].shape[1:]) for name, x in per_pass.items()} for i, y in enumerate(ids)]


def completion_states(
    hidden_states: list[torch.Tensor], rows: list[torch.Tensor], columns: list[torch.Tensor], shape: tuple[int, int]
) -> torch.Tensor:
    """Hidden states of the tokens of all passes, of shape `(T, H)` each, in their places in `shape`, else zero."""
    states = torch.cat(hidden_states)
    return states.new_zeros(*shape, states.shape[-1]).index_put((torch.cat(rows), torch.cat(columns)), states)


def router_sums(
    backbone: nn.Module, router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Terms of the load-balancing loss that add up over tokens: how often and how likely each expert is chosen."""
    top_k = backbone.config.get_text_config().num_experts_per_tok
    is_token = slice(None) if attention_mask is None else attention_mask.flatten().bool()
    logits = torch.cat([layer_logits.reshape(-1, layer_logits.shape[-1])[is_token] for layer_logits in router_logits])
    probs = nn.functional.softmax(logits, dim=-1)
    chosen = nn.functional.one_hot(probs.topk(top_k, dim=-1).indices, probs.shape[-1])
    return chosen.sum(0).to(probs.dtype), probs.sum(0), len(probs)


def load_balancing_loss(sums: list[tuple[torch.Tensor, torch.Tensor, int]]) -> torch.Tensor:
    """Mixtral's load-balancing loss (Switch Transformer, equations 4 to 6) from the sums of [`router_sums`]."""
    chosen, probs, count = (sum(terms) for terms in zip(*sums, strict=True))
    return ((chosen / count) * (probs / count)).sum() * probs.shape[-1]


def rope_parameters(config: PretrainedConfig) -> list[dict]:
    """Parameters of each rotary embedding of a model: one for all layers, or one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return list(parameters.values()) if all(isinstance(x, dict) for x in parameters.values()) else [parameters]


def exceeds_longrope(config: PretrainedConfig, length: int) -> bool:
    """
    Whether rows of `length` tokens are too long for the frequencies of the first training. `longrope` has others for
    them (Phi-3, Phi-4-mini).
    """
    longropes = [x for x in rope_parameters(config) if x.get("rope_type") == "longrope"]
    return any(length > x["original_max_position_embeddings"] for x in longropes)


def position_shift(config: PretrainedConfig, length: int, prefix_length: int) -> int:
    """
    What is added to the positions of every pass, so that even the shortest is taken for as long as rows of `length`
    tokens are: `longrope` chooses its frequencies by the largest position. Only differences of positions matter
    otherwise.
    """
    return length - prefix_length + 1 if exceeds_longrope(config, length) else 0


# Two rows of nine tokens are the fewest that have all there is to get wrong: a prompt of more than one token that both
# share, left padding before it, completions of more than one token, and right padding behind one of them
PROBE_ROWS, PROBE_LENGTH, PROBE_PREFIX_LENGTH = 2, 9, 6
_PROBE_STD = 1.0


@contextmanager
def _probing(model: PreTrainedModel, training: bool) -> Iterator[None]:
    """
    Put a model into training or evaluation mode, without traces of what happens then. In training mode, the trainable
    parameters that start at zero, as those of adapters do, have values that show what depends on them.
    """
    mode, device = model.training, model.get_input_embeddings().weight.device
    zeros = [param.data for param in model.parameters() if training and param.requires_grad and not param.any()]
    model.train(training)
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
            for param in zeros:
                param.normal_(std=_PROBE_STD)
            yield
    finally:
        for param in zeros:
            param.zero_()
        model.train(mode)


_HALF_PRECISION = (torch.float16, torch.bfloat16)


def _tensors_of_layers(backbone: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[dict, str]]]]:
    """
    Modules, and the weights and buffers that are needed while they run: a layer with all that is in it, and what lies
    outside of layers by itself. Embeddings are left out, which are large, and exact in any dtype.
    """
    layers = {layer for stack in backbone.modules() if isinstance(stack, nn.ModuleList) for layer in stack}
    inside = {module for layer in layers for module in layer.modules() if module is not layer}
    for module in set(backbone.modules()) - inside:
        parts = module.modules() if module in layers else [module]
        places = [
            (tensors, name)
            for part in parts
            if not isinstance(part, nn.Embedding)
            for tensors in (part._parameters, part._buffers)
            for name, x in tensors.items()
            if x is not None and x.dtype in _HALF_PRECISION
        ]
        yield module, places


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Have a model in half precision compute in float32, layer by layer: there is no room for a copy of the model."""
    handles, before = [], {}

    def enter(places, module, args):
        for tensors, name in places:
            x = tensors[name]
            if x.dtype in _HALF_PRECISION:
                before[id(x)] = (x, x.data)
                x.data = x.data.float()

    def leave(places, module, args, output):
        for tensors, name in places:
            x, data = before.pop(id(tensors[name]), (None, None))
            if x is not None:
                x.data = data

    def widen(module, args, output):
        return output.float()

    try:
        for module, places in _tensors_of_layers(model.base_model):
            if isinstance(module, nn.Embedding):
                handles.append(module.register_forward_hook(widen))
            elif places:
                handles.append(module.register_forward_pre_hook(functools.partial(enter, places)))
                handles.append(module.register_forward_hook(functools.partial(leave, places)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for x, data in before.values():
            x.data = data


def error_of_passes(model: PreTrainedModel, passes, training: bool = False) -> float:
    """
    Compare hidden states computed in passes with those of whole rows, on a few tokens. A model in half precision
    computes them in float32: what its own dtype rounds away hides errors that add up in training.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model.
        passes:
            Passes to compare, with a `prefix_length` of `PROBE_PREFIX_LENGTH`.
        training (`bool`, *optional*, defaults to `False`):
            Whether to compare what training computes, where noise that passes cannot have alike is an error.

    Returns:
        `float`: Relative error, the median over the tokens of a row, of the worse row. 0 if rounding explains it, or
        if the weights are not here, but on other processes.
    """
    if any(param.is_meta or param.numel() == 0 for param in model.parameters()):
        return 0.0
    dtypes = {param.dtype for param in model.parameters()}
    # No backward follows. What it would need, float32 weights of all layers for one, is not kept.
    with _probing(model, training), saved_tensors_hooks(lambda x: None, lambda x: x):
        # Quantized weights compute in a dtype of their own
        if dtypes <= {*_HALF_PRECISION, torch.float32}:
            try:
                with _in_float32(model):
                    return _beyond_rounding(_compare(model, passes), torch.float32)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # some kernels do not take float32
                if not dtypes & set(_HALF_PRECISION):
                    raise
        # Layers with a state compute in float32 whatever the weights are
        dtype = max(model.dtype, torch.float32, key=lambda dtype: torch.finfo(dtype).eps)
        return _beyond_rounding(_compare(model, passes), dtype)


def _compare(model: PreTrainedModel, passes) -> float:
    weight = model.get_input_embeddings().weight
    input_ids = torch.arange(PROBE_ROWS * PROBE_LENGTH, device=weight.device) % weight.shape[0]
    input_ids = input_ids.view(PROBE_ROWS, PROBE_LENGTH)
    input_ids[1, :PROBE_PREFIX_LENGTH] = input_ids[0, :PROBE_PREFIX_LENGTH]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[:, 0] = 0  # left padding of the prompt
    attention_mask[1, -1] = 0  # right padding of a completion
    # Gradients are on, because the passes of training look their tokens up in another way
    in_passes = passes.forward(model.base_model, input_ids, attention_mask).last_hidden_state
    whole = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    has_token = attention_mask[:, PROBE_PREFIX_LENGTH - 1 :].bool()
    whole = whole[:, PROBE_PREFIX_LENGTH - 1 :][has_token].float()
    errors = (in_passes[has_token].float() - whole).norm(dim=-1) / whole.norm(dim=-1)
    return max(row.median().item() for row in errors.split(has_token.sum(1).tolist()))


def _beyond_rounding(error: float, dtype: torch.dtype) -> float:
    # Equal up to half of the digits
    return error if not error <= torch.finfo(dtype).eps ** 0.5 else 0.0
