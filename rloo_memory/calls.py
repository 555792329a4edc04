"""Methods of a trainer and forwards of its models: what is put in their place, and what they are called with."""

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """What a method is called with, by the names that TRL has for it. An override may have others, or none."""

    names: list[str]
    num_positional: int
    given: dict[str, Any]

    @classmethod
    def of(cls, names: list[str], args: tuple, kwargs: dict) -> "Call":
        return cls(names, len(args), {**dict(zip(names[: len(args)], args, strict=True)), **kwargs})

    def but(self, **changes) -> "Call":
        return replace(self, given={**self.given, **changes})

    def to(self, method: Callable):
        """Call a method as this call was made, by position what was given by position."""
        positional = self.names[: self.num_positional]
        named = {name: x for name, x in self.given.items() if name not in positional}
        return method(*(self.given[name] for name in positional), **named)


@dataclass
class Scored:
    """Rows whose log-probabilities are asked for, with which models are called in parts: those of a batch in its
    order, or some `alone`, which share among themselves."""

    call: Call
    alone: bool = False
    place: int = 0  # behind the rows with which a model was called

    def next_rows(self, input_ids: torch.Tensor | None) -> slice | None:
        """The rows with which a model is called, None for something of a subclass's own."""
        all_ids = self.call.given["input_ids"]
        if input_ids is None or input_ids.shape[1:] != all_ids.shape[1:]:
            return None
        start = self.place % len(all_ids)  # a subclass may score them all again
        rows = all_ids[start : start + len(input_ids)]
        if rows.data_ptr() != input_ids.data_ptr() and not torch.equal(rows, input_ids):
            return None
        self.place = start + len(input_ids)
        return slice(start, self.place)


@contextmanager
def replaced(owner, name: str, value) -> Iterator[None]:
    """`owner.name` is `value`, and then what it was."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        put_back(owner, name, before)


def put_back(owner, name: str, before) -> None:
    """`owner.name` is what it was before; None: it had none of its own."""
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


class Replaced:
    """
    Calls `hook` with a `PromptSharing` and what it stands for, while that shares prompts. A copy of a model, in memory
    or on disk, has what it stands for. A model may live longer than a trainer, and keeps none alive.
    """

    def __init__(self, sharing, original: Callable, hook: Callable, before):
        functools.update_wrapper(self, original)
        self.sharing, self.original, self.hook, self.before = weakref.ref(sharing), original, hook, before

    @property
    def is_over(self) -> bool:
        sharing = self.sharing()
        return sharing is None or sharing.passes is None

    def __call__(self, *args, **kwargs):
        if self.is_over:
            return self.original(*args, **kwargs)
        return self.hook(self.sharing(), self.original, *args, **kwargs)

    @property
    def __code__(self):
        """For `torch.export`. Not `__func__`, which accelerate would call in its place."""
        return self.original.__code__

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.original, memo)

    def __reduce__(self):
        return unchanged, (self.original,)


def unchanged(x):
    return x
