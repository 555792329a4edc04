"""Passes: whether a model computes the same in them as in whole rows, tried on a few tokens."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .passes import text_configs

# Two rows of nine tokens are the fewest that have all there is to get wrong: a prompt of more than one token that both
# share, left padding before it, completions of more than one token, and right padding behind one of them
PROBE_ROWS, PROBE_LENGTH, PROBE_PREFIX_LENGTH = 2, 9, 6

# Of prompts that are not alike, of which one has padding: how many tokens both begin with
PROBE_COMMON_LENGTH = 2
_PROBE_STD = 1.0

# A position that no row has: whatever grows with positions is far from what it is on a few tokens
_FAR = 1 << 20


@contextmanager
def _probing(model: PreTrainedModel, training: bool) -> Iterator[None]:
    """
    Put a model into training or evaluation mode, without traces of what happens then. The trainable parameters that
    have one value throughout, as some of adapters (0) and those of new norms (1), have values that show what depends
    on them.
    """
    device = model.get_input_embeddings().weight.device
    devices = [x for x in {param.device for param in model.parameters()} if x.type != "cpu"]
    modes = {module: module.training for module in model.modules()}
    trained = (param.data for param in model.parameters() if param.requires_grad and param.numel() > 1)
    alike = [(param, low.item()) for param in trained for low, high in [param.aminmax()] if low == high]
    model.train(training)
    try:
        with (
            without_dropout(model),
            torch.autocast(device.type, enabled=False),  # of who calls: it would round what is compared in float32
            torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cpu"),
        ):
            for param, value in alike:
                param.normal_(value, _PROBE_STD)
            yield
    finally:
        for param, value in alike:
            param.fill_(value)
        for module, was_training in modes.items():
            module.training = was_training


def dropouts(model: nn.Module) -> list[nn.Module]:
    """Its dropout layers that drop something in training."""
    return [module for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """What is compared with whole rows must not draw other noise."""
    active = [module for module in dropouts(model) if module.training]
    for module in active:
        module.eval()
    try:
        yield
    finally:
        for module in active:
            module.train()


class WholeRowsError(ValueError):
    """A model fails whatever way its rows go through it."""


_HALF_PRECISION = (torch.float16, torch.bfloat16)


def _layers(backbone: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """
    Modules, and those whose weights and buffers are needed while they run: a layer with all that is in it, and what
    lies outside of layers by itself.
    """
    layers = {layer for stack in backbone.modules() if isinstance(stack, nn.ModuleList) for layer in stack}
    inside = {module for layer in layers for module in layer.modules() if module is not layer}
    for module in set(backbone.modules()) - inside:
        yield module, list(module.modules()) if module in layers else [module]


def gathered(weights: Iterable[nn.Parameter]) -> AbstractContextManager:
    """What ZeRO-3 keeps on other processes is here within; all of them need to come by."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(weights))


@contextmanager
def _layer_by_layer(model: PreTrainedModel, in_float32: bool) -> Iterator[None]:
    """
    Have the weights of each layer here while it runs, as they are only in training where ZeRO-3 divides them. A model
    in half precision computes `in_float32`: there is no room for a copy of the model. Embeddings are left out, which
    are large, and exact in any dtype.
    """
    entered: dict[nn.Module, ExitStack] = {}

    @torch.compiler.disable
    def enter(parts, module, args):
        entered[module] = stack = ExitStack()
        stack.enter_context(gathered(x for part in parts for x in part.parameters(recurse=False)))
        for part in parts if in_float32 else ():
            for x in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if x.dtype in _HALF_PRECISION and not isinstance(part, nn.Embedding):
                    stack.callback(setattr, x, "data", x.data)
                    x.data = x.data.float()

    @torch.compiler.disable
    def leave(module, args, output):
        entered.pop(module).close()
        return output.float() if in_float32 and isinstance(module, nn.Embedding) else None

    try:
        with ExitStack() as hooks:
            for module, parts in _layers(model.base_model) if in_float32 or is_deepspeed_zero3_enabled() else ():
                # Before anything else looks at them, and until all others have
                before = functools.partial(enter, parts)
                hooks.enter_context(module.register_forward_pre_hook(before, prepend=True))
                hooks.enter_context(module.register_forward_hook(leave))
            yield
    finally:
        for stack in entered.values():
            stack.close()


@contextmanager
def _in_eager(model: PreTrainedModel) -> Iterator[None]:
    """Have the attention of the modeling file stand in for kernels that take no float32."""
    with ExitStack() as stack:
        for config in model.base_model._prefix_sharing.configs:
            stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
            config._attn_implementation_internal = "eager"
        yield


def attends_to_later_tokens(model: PreTrainedModel) -> str:
    """The class of attention in the text part of a model if none of it is causal, which small weights would hide."""
    configs, modules = text_configs(model), model.base_model.modules()
    of_text = (module for module in modules if any(getattr(module, "config", None) is x for x in configs))
    attending = [module for module in of_text if hasattr(module, "is_causal")]
    return type(attending[0]).__name__ if attending and not any(x.is_causal for x in attending) else ""


def can_be_tried(model: nn.Module) -> bool:
    """Whether all weights are here: FSDP2 may have divided them, and other processes, or disks, may have them."""
    return not any(param.is_meta or isinstance(param, DTensor) for param in model.parameters())


def error_of_passes(model: PreTrainedModel, passes, training: bool = False, prompts_alike: bool = True) -> float:
    """
    Relative error of hidden states computed in passes, with a `prefix_length` of `PROBE_PREFIX_LENGTH`, beside those
    of whole rows: the median over the tokens of a row, of the worse row, whose prompts are the same, or, if not
    `prompts_alike`, begin with `PROBE_COMMON_LENGTH` tokens alike and differ in their padding. 0 if rounding explains
    it. In training mode, noise that passes cannot have alike is an error. A model in half precision computes in
    float32: what its own dtype rounds away hides errors that add up in training. If its attention is that of other
    kernels than PyTorch's, eager attention computes in their place, and then they do in the model's dtype.
    """
    dtypes = {param.dtype for param in model.parameters()}
    # No backward follows. What it would need, float32 weights of all layers for one, is not kept.
    with _probing(model, training), saved_tensors_hooks(lambda x: None, lambda x: x):
        # Quantized weights compute in a dtype of their own
        if dtypes <= {*_HALF_PRECISION, torch.float32}:
            try:
                takes_float32 = model.config.get_text_config()._attn_implementation in ("sdpa", "eager")
                with _layer_by_layer(model, in_float32=True), nullcontext() if takes_float32 else _in_eager(model):
                    error = _beyond_rounding(_compare(model, passes, prompts_alike), torch.float32)
                if takes_float32 or error != 0:
                    return error
            except torch.OutOfMemoryError:
                raise
            except Exception:  # some kernels do not take float32
                if not dtypes & set(_HALF_PRECISION):
                    raise
        # Layers with a state compute in float32 whatever the weights are
        dtype = max(model.dtype, torch.float32, key=lambda dtype: torch.finfo(dtype).eps)
        with _layer_by_layer(model, in_float32=False):
            return _beyond_rounding(_compare(model, passes, prompts_alike), dtype)


def counts_positions(model: PreTrainedModel) -> bool:
    """
    Whether more of a model than its rotary embeddings, of which differences matter, depends on positions: queries may
    be scaled by them (Ministral 3 and Mistral 4 behind thousands of tokens, Beam).
    """
    rotary = [module for module in model.base_model.modules() if "Rotary" in type(module).__name__]

    def bring_back(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def near(x):
            return x - _FAR if isinstance(x, torch.Tensor) and not x.is_floating_point() else x

        return tuple(map(near, args)), {name: near(x) for name, x in kwargs.items()}

    def forward(backbone: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        positions = torch.arange(_FAR, _FAR + input_ids.shape[1], device=input_ids.device)[None]
        with ExitStack() as hooks:
            for module in rotary:
                hooks.enter_context(module.register_forward_pre_hook(bring_back, with_kwargs=True))
            states = backbone(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
            ).last_hidden_state
        return SimpleNamespace(last_hidden_state=states[:, PROBE_PREFIX_LENGTH - 1 :])

    # Models without such modules look up what they have for each position, and have nothing for these
    return bool(rotary) and error_of_passes(model, SimpleNamespace(forward=forward)) != 0


def _compare(model: PreTrainedModel, passes, prompts_alike: bool) -> float:
    weight = model.get_input_embeddings().weight
    vocab_size = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 leaves nothing of it here
    input_ids = torch.arange(PROBE_ROWS * PROBE_LENGTH, device=weight.device) % vocab_size
    input_ids = input_ids.view(PROBE_ROWS, PROBE_LENGTH)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, 0] = 0  # left padding of the prompt
    if prompts_alike:
        input_ids[1, :PROBE_PREFIX_LENGTH] = input_ids[0, :PROBE_PREFIX_LENGTH]
        attention_mask[1, 0] = 0
    else:
        input_ids[1, :PROBE_COMMON_LENGTH] = input_ids[0, 1 : 1 + PROBE_COMMON_LENGTH]
    attention_mask[1, -1] = 0  # right padding of a completion
    # Gradients are on, because the passes of training look their tokens up in another way
    try:
        whole = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except Exception as exception:
        raise WholeRowsError(
            f"A forward of {type(model).__name__} on a few tokens fails, with its rows whole "
            f"({type(exception).__name__}: {exception})."
        ) from exception
    whole = whole.to(weight.device)
    in_passes = passes.forward(model.base_model, input_ids, attention_mask).last_hidden_state
    has_token = attention_mask[:, PROBE_PREFIX_LENGTH - 1 :].bool()
    whole = whole[:, PROBE_PREFIX_LENGTH - 1 :][has_token].float()
    errors = (in_passes[has_token].float() - whole).norm(dim=-1) / whole.norm(dim=-1)
    errors = errors.where(whole.isfinite().all(-1), 0)  # what a model computes anyway is not the fault of passes
    return torch.stack([row.median() for row in errors.split(has_token.sum(1).tolist())]).max().item()


def _beyond_rounding(error: float, dtype: torch.dtype) -> float:
    # Equal up to half of the digits
    return error if not error <= torch.finfo(dtype).eps ** 0.5 else 0.0
