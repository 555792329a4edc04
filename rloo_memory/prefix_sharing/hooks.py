"""
Hooks of the user's own on a model whose rows go through it in passes. One that only looks on may see what it likes.
One that changes what a layer computes was written for a row an example, and a pass has other rows: it is found where
it does so.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rloo_memory.calls import replaced

from .passes import GoesWhole

# Theirs do what they do for each token, or gather weights and record gradients
_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "rloo_memory"}
_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _is_own(hook: Callable) -> bool:
    """Whether a hook is of none of the libraries that put hooks of theirs on models."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] not in _LIBRARIES


def _own_hooks(model: nn.Module) -> Iterator[tuple[dict[int, Callable], int]]:
    """Hooks of one kind on a module, and the number of one of them that is the user's."""
    for module in model.modules():
        for hooks in (getattr(module, name) for name in _DICTS):
            yield from ((hooks, number) for number in list(hooks) if _is_own(hooks[number]))


def hooks_of(model: nn.Module) -> frozenset[int]:
    """Numbers of the user's hooks, each of which no other hook has."""
    return frozenset(number for _, number in _own_hooks(model))


def is_here(thread: int) -> bool:
    """Whether this is that thread. The graph of a compiled model cannot ask."""
    return torch.compiler.is_compiling() or get_ident() == thread


@contextmanager
def without_own_hooks(module: nn.Module, thread: int) -> Iterator[None]:
    """In here, a module runs none of the user's hooks, which have seen in passes what it gives. Other threads do."""

    def elsewhere(hook: Callable) -> Callable:
        return functools.wraps(hook)(lambda *given: None if is_here(thread) else hook(*given))

    with ExitStack() as stack:
        for name in _DICTS:
            hooks = [(number, x, _is_own(x)) for number, x in getattr(module, name).items()]
            kept = [each for each in hooks if "forward" in name or not each[2]]
            others = OrderedDict((number, elsewhere(x) if is_own else x) for number, x, is_own in kept)
            stack.enter_context(replaced(module, name, others))
        yield


def has_parameter_hooks(model: nn.Module) -> bool:
    """Whether a hook of the user's own gets the gradient of a parameter, or runs once it has it."""
    hooks = (
        (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)) for param in model.parameters()
    )
    return any(_is_own(hook) for pair in hooks for kind in pair if kind for hook in kind.values())


def state_of(model: nn.Module) -> tuple:
    """
    Which of PEFT's adapters are switched on or merged, and how they are scaled, and what is trained: what a prompt
    left is of one state.
    """
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    adapters = (repr(vars(module)[name]) for module in model.modules() for name in names if name in vars(module))
    return *adapters, *(param.requires_grad for param in model.parameters())


def versions_of(model: nn.Module) -> list[int]:
    """Of its weights: each changes where something writes into a weight."""
    # PEFT puts the weights that an adapter adds to by name (`target_parameters`) in their places anew in each forward
    weights = (module.get_param() for module in model.modules() if hasattr(module, "get_param"))
    put = {id(param) for param in weights if not param.requires_grad}
    unwritten = (id(param) in put or param.is_inference() for param in model.parameters())
    return [0 if skip else param._version for skip, param in zip(unwritten, model.parameters(), strict=True)]


def weights_of(model: nn.Module) -> tuple:
    """Adapters, what is trained, and single values of it: `.data` and `functional_call` leave no other trace."""
    here = (x for x in model.parameters() if not (x.is_meta or isinstance(x, DTensor)))
    trained = [x for x in here if x.requires_grad and x.numel() > 0]
    values = [x.detach()[(0,) * x.ndim].item() for x in trained[:: 1 + len(trained) // 32]]
    return state_of(model), repr(values)


def traces_of(model: nn.Module) -> tuple:
    """What shows that something other than a backward has changed weights or their gradients."""
    grads = [(id(param.grad), getattr(param.grad, "_version", 0)) for param in model.parameters()]
    return versions_of(model), weights_of(model), grads


def _versions(values) -> list[int]:
    """Of the tensors among them: each changes where something writes into a tensor."""
    if isinstance(values, torch.Tensor):
        return [] if values.is_inference() else [values._version]
    values = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [version for value in values for version in _versions(value)]


def _checked(hook: Callable) -> Callable:
    """A hook that must not change what it is given."""

    def checked(module: nn.Module, *given) -> None:
        before = _versions(given)
        if hook(module, *given) is not None or _versions(given) != before:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise GoesWhole(
                f"The hook `{name}` changes what {type(module).__name__} computes, and has been there for less long "
                "than prompts are shared, so it may expect a row for each completion. Register it before: then it is "
                "tried on a few tokens."
            )

    return checked


@contextmanager
def watched(model: nn.Module, known: frozenset[int]) -> Iterator[None]:
    """Raise a [`GoesWhole`] where a hook of the user's, none of these that are `known`, changes something."""
    found = [(hooks, number, hooks[number]) for hooks, number in _own_hooks(model) if number not in known]
    for hooks, number, hook in found:
        hooks[number] = _checked(hook)
    try:
        yield
    finally:
        for hooks, number, hook in found:
            if number in hooks:
                hooks[number] = hook
