"""
Passes: the rows of a batch go through a model in parts, and the activations of one part are alive at a time.

A pass is what goes through the model together: a prompt, some completions of a prompt, or some whole rows.

Shape suffixes: B rows, P prompt columns, C completion columns, T tokens of a pass, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .fsdp2 import is_sharded


class GoesWhole(ValueError):
    """Rows cannot go through the model in passes. They can as they are, as long as no other process waits for it."""


@dataclass
class TokenCount:
    """Tokens of rows, padding included."""

    in_passes: int = 0  # that went through the model
    in_whole_rows: int = 0  # that the same rows have, in the batches in which TRL calls the model

    def add(self, in_passes: int, in_whole_rows: int) -> None:
        self.in_passes += in_passes
        self.in_whole_rows += in_whole_rows


def has_several_processes() -> bool:
    """Whether other processes train beside this one. vLLM in the trainer's process initializes a group of one."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def gather_together(backbone: nn.Module) -> bool:
    """Whether processes gather weights together in each pass, and so must call the model equally often."""
    return has_several_processes() and is_sharded(backbone)


def on_any_process(found: list[bool], device: torch.device) -> list[bool]:
    """Of each, whether it is so on any process."""
    if not has_several_processes():
        return found
    flags = torch.tensor(found, dtype=torch.int, device=device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return flags.bool().tolist()


def on_any_that_gathers(found: bool, backbone: nn.Module, device: torch.device) -> bool:
    """Whether it is so on any of the processes that must call the model equally often; without these, here."""
    return on_any_process([found], device)[0] if gather_together(backbone) else found


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host. On CUDA the host does not wait for it, so it has to lie in pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)


@dataclass(frozen=True)
class PassesOutput:
    """Output of a backbone whose rows went through it in passes."""

    last_hidden_state: torch.Tensor  # (B, C + 1, H), from the last prompt token on, zero where the token is padding
    aux_loss: torch.Tensor | None = None  # load-balancing loss of experts over all tokens, prompts included, if asked


def layers_alone_recompute(backbone: nn.Module) -> bool:
    """
    Whether the layers of a pass are recomputed one by one, and not all of them when the backward reaches the pass.
    ZeRO-3 keeps the frozen weights that a recomputation gathers until the backward of a later module is done: those of
    the whole model if it recomputes a pass, those of a layer if it recomputes a layer.
    """
    if not is_deepspeed_zero3_enabled() or not backbone.is_gradient_checkpointing:
        return False
    return any(not param.requires_grad for param in backbone.parameters())


def split_by_tokens(lengths: list[int], budget: int, packed: bool) -> list[list[int]]:
    """
    Rows of each pass, so that a pass has no more than `budget` tokens, or a single row. Longest rows first, which
    leaves little padding where rows are padded to the longest of a pass (`packed=False`).
    """
    passes: list[list[int]] = []
    room = width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        size = lengths[row] if packed else width
        if not passes or size > room:
            passes.append([])
            room, size = budget, lengths[row]
            width = size
        passes[-1].append(row)
        room -= size
    return [sorted(rows) for rows in passes]


def same_number_everywhere(
    passes: list[tuple[Any, torch.Tensor]], backbone: nn.Module, device: torch.device
) -> list[tuple[Any, torch.Tensor]]:
    """Split passes until every process has as many, if processes gather weights together in each."""
    if not gather_together(backbone):
        return passes
    number = torch.tensor(len(passes), device=device)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    number = number.item()
    while len(passes) < number:
        longest = max(range(len(passes)), key=lambda i: len(passes[i][1]))
        group, rows = passes[longest]
        passes[longest : longest + 1] = [(group, half) for half in rows.tensor_split(2)]
    return passes


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


def check_mask(attention_mask: torch.Tensor) -> None:
    """
    Raise a [`GoesWhole`] if the tokens of a row do not follow one another in a mask on the host. Only these go through
    the model, but a token behind a masked one is scored from what the model makes of the masked one.
    """
    starts = nn.functional.pad(attention_mask, (1, 0)).diff(dim=1) > 0
    rows = (starts.sum(1) > 1).nonzero().flatten().tolist()
    if rows:
        raise GoesWhole(
            f"The attention mask of row {rows[0]} of the batch is 0 between tokens (at column "
            f"{starts[rows[0]].nonzero()[1].item() - 1}), and rows that go through the model in passes must have "
            "their padding around them. To train on some tokens of a completion only, leave its attention mask at 1 "
            "and mask the loss, or set `prefix_sharing=False` and `tokens_per_forward=None`."
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
    if backbone.config.model_type == "falcon_h1":  # it scales what it looks up itself, and takes the rest as it is
        embeds["inputs_embeds"] = embeds["inputs_embeds"] * backbone.embedding_multiplier
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
    layers = [x.reshape(-1, x.shape[-1]).to(router_logits[0].device) for x in router_logits]
    is_token = slice(None) if attention_mask is None else attention_mask.flatten().bool()
    logits = torch.cat([layer_logits[is_token] for layer_logits in layers])
    probs = nn.functional.softmax(logits, dim=-1)
    chosen = nn.functional.one_hot(probs.topk(top_k, dim=-1).indices, probs.shape[-1])
    dtype = torch.promote_types(probs.dtype, torch.float32)  # sums of thousands have no room in half precision
    return chosen.sum(0).to(dtype), probs.sum(0, dtype=dtype), len(probs)


def load_balancing_loss(sums: list[tuple[torch.Tensor, torch.Tensor, int]]) -> torch.Tensor:
    """Mixtral's load-balancing loss (Switch Transformer, equations 4 to 6) from the sums of [`router_sums`]."""
    chosen, probs, count = (sum(terms) for terms in zip(*sums, strict=True))
    return ((chosen / count) * (probs / count)).sum() * probs.shape[-1]


def rope_parameters(config: PretrainedConfig) -> list[dict]:
    """Parameters of each rotary embedding of a model: one for all layers, or one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return list(parameters.values()) if all(isinstance(x, dict) for x in parameters.values()) else [parameters]


def text_configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Those of the text part of a model: towers have others. Copies of layers can have copies of them."""
    text_config = model.config.get_text_config()
    configs = [getattr(module, "config", None) for module in model.modules()]
    distinct = {id(x): x for x in configs if isinstance(x, PretrainedConfig)}.values()
    return [x for x in distinct if type(x) is type(text_config) or x.get_text_config() is text_config]


def position_shift(config: PretrainedConfig, length: int) -> int:
    """
    What is added to the positions of every pass, so that even the shortest is taken for as long as rows of `length`
    tokens are: `longrope` (Phi-3, Phi-4-mini) chooses its frequencies by the largest position, and 0 where rows are
    not too long for those of its first training. Only differences of positions matter otherwise, also between rows of
    several lengths, which may continue the same prompt.
    """
    longropes = [x for x in rope_parameters(config) if x.get("rope_type") == "longrope"]
    trained = [x["original_max_position_embeddings"] for x in longropes]
    return max((x for x in trained if length > x), default=0)
