"""
Prefix sharing for prompts that begin alike: what all of them begin with goes through the model once for all.

A system prompt, descriptions of tools or examples stand in front of every prompt of a rollout. What they leave is the
parent of what each prompt leaves, see [`SharedPrefix`]. In training they go through the model with the first micro-batch
of an update, and have their backward behind the last. In scoring they go through it once for all rows of a rollout.

Shape suffixes: B rows, P prompt columns, L tokens that prompts begin with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .memory import SharedPrefix


# With fewer tokens, a pass of their own takes longer than it saves: with 64, updates of two and of eight prompts took 1.05
# times as long on a CPU, with 128 1.03 and 0.92 times, with 256 0.94 and 0.78 times
MIN_COMMON_TOKENS = 128

# What a prompt has behind them: its last token, which goes with the completions, and two more, because with a single
# token and a state, mixers take a path for decoding that writes in place
_MIN_OWN_TOKENS = 3


def first_columns(prompt_mask: torch.Tensor) -> torch.Tensor:
    """Column of the first token of each left-padded prompt, of shape `(B,)`."""
    return (prompt_mask != 0).int().argmax(1)


def first_tokens(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, length: int) -> torch.Tensor:
    """The first tokens of each prompt, of shape `(B, length)`, which have at least so many."""
    columns = first_columns(prompt_mask)[:, None] + torch.arange(length, device=prompt_ids.device)
    return prompt_ids.gather(1, columns)


def common_length(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, image_token_id: int | None = None) -> int:
    """
    Number of tokens that all prompts of shape `(B, P)` begin with and that can go through a model before them, without
    images, or 0 if they are too few to be worth it.
    """
    lengths = prompt_mask.sum(1)
    length = int(lengths.min()) - _MIN_OWN_TOKENS
    if length < MIN_COMMON_TOKENS:
        return 0
    ids = first_tokens(prompt_ids, prompt_mask, length)
    is_common = (ids == ids[0]).all(0)
    if image_token_id is not None:
        is_common &= ids[0] != image_token_id
    length = int(is_common.int().cumprod(0).sum())
    return length if length >= MIN_COMMON_TOKENS else 0


class CommonStart:
    """
    What prompts begin with, while they go through the model.

    Args:
        length (`int`):
            Number of tokens, L.
        in_one_backward (`bool`, *optional*, defaults to `False`):
            Whether the last backward of an update goes on through it, see [`OpenPrefix`].
    """

    def __init__(self, length: int, in_one_backward: bool = False):
        self.length = length
        self.in_one_backward = in_one_backward
        self.close()

    def close(self) -> None:
        """Forget what is kept for other rows."""
        self.is_open = False  # whether other rows than those of this forward read it
        self._ids: torch.Tensor | None = None
        self._prefix: SharedPrefix | None = None
        self._is_last = self._prompts_go_on = self._has_led_on = False

    def open(self, is_last: bool = False, prompts_go_on: bool = False) -> None:
        """
        Keep it for the next rows. `is_last` says whether the optimizer follows this micro-batch, `prompts_go_on` whether
        prompts that go through the model with it have their backward with the last.
        """
        self.is_open, self._is_last, self._prompts_go_on = True, is_last, prompts_go_on

    def is_shared_by(self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, num_prompts: int) -> bool:
        """Whether these prompts of shape `(B, P)`, on the host, begin with it, and it is worth it."""
        if not self.is_open and num_prompts == 1:
            return False
        if prompt_mask.sum(1).min() < self.length + _MIN_OWN_TOKENS:
            return False
        ids = first_tokens(prompt_ids, prompt_mask, self.length)
        return bool((ids == (ids[0] if self._ids is None else self._ids)).all())

    @property
    def has_prefix(self) -> bool:
        """Whether it went through the model with earlier rows."""
        return self._prefix is not None

    def go_on(self, ids: torch.Tensor, prefix: "SharedPrefix | None") -> "SharedPrefix":
        """
        What the prompts of a forward continue. `prefix` is what its `ids` of shape `(L,)` left, if they went through
        the model with this forward.
        """
        if not self.is_open:
            prefix.lead_on()
            return prefix
        if prefix is not None:
            prefix.end_here()
            self._ids, self._prefix = ids, prefix
        if self._is_last and self.in_one_backward and not self._has_led_on:
            self._prefix.lead_on()
            self._has_led_on = True
        return self._prefix

    @contextmanager
    def read_by_prompts(self, prefix: "SharedPrefix") -> Iterator[None]:
        """While prompts go through the model that continue `prefix`."""
        if self.in_one_backward and self._prompts_go_on and not self._is_last:
            with prefix.leading_on():
                yield
        else:
            yield

    def backward(self) -> None:
        """End of the update: backward, unless it was part of that of the last micro-batch."""
        prefix, has_led_on = self._prefix, self._has_led_on
        self.close()
        if prefix is not None and not has_led_on:
            prefix.backward()
