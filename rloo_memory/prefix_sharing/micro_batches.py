"""
Prefix sharing for gradient accumulation: the completions of a prompt can be spread over several micro-batches.

The prompt goes through the model with the first of them. Each backward ends at the keys and values of the prompt and
adds to their gradients. When the last has, the backward of the prompt follows, once.

Where processes reduce gradients, they do so in the last backward, which has to have all of them: then it does not end
at the keys and values but goes on through the prompt. That takes more memory, because autograd holds what a weight gets
from the completions until it has what the weight gets from the prompt.
"""

from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .memory import SharedPrefix


class OpenPrefix:
    """
    Prefix of the prompt whose completions are going through the model, micro-batch after micro-batch.

    Args:
        num_micro_batches (`int`):
            Number of consecutive micro-batches that hold the completions of a prompt.
        in_one_backward (`bool`, *optional*, defaults to `False`):
            Whether the last backward goes on through the prompt. `backward` has to be called after each micro-batch
            either way.
    """

    def __init__(self, num_micro_batches: int, in_one_backward: bool = False):
        self.num_micro_batches = num_micro_batches
        self.in_one_backward = in_one_backward
        self.close()

    def close(self) -> None:
        """Forget the prompt, and what is kept for its backward."""
        self.micro_batch: int | None = None
        self.is_entered = False  # between `enter` and `backward`
        self._has_led_on = False
        self._prompt_ids: torch.Tensor | None = None
        self._prefix: SharedPrefix | None = None

    def enter(self, step: int, updates: bool) -> None:
        """
        Go to the next micro-batch, with `step` others before it. `updates` says whether the optimizer follows it.

        Raises:
            RuntimeError: If the micro-batches of a prompt do not all belong to the same update.
        """
        micro_batch = step % self.num_micro_batches
        if micro_batch == 0:
            self.close()
        elif self.micro_batch != micro_batch - 1:
            raise RuntimeError(
                f"Micro-batch {micro_batch + 1} of the {self.num_micro_batches} of a prompt does not follow its "
                "first one. After an interruption, create the trainer again and resume from a checkpoint."
            )
        self.micro_batch, self.is_entered = micro_batch, True
        if updates and not self.is_last:
            raise RuntimeError(
                f"The weights would be updated after {self.micro_batch + 1} of the {self.num_micro_batches} "
                "micro-batches of a prompt. After an interruption, create the trainer again and resume from a "
                "checkpoint."
            )

    @property
    def is_first(self) -> bool:
        return self.micro_batch == 0

    @property
    def is_last(self) -> bool:
        return self.micro_batch == self.num_micro_batches - 1

    @property
    def has_prefix(self) -> bool:
        """Whether the prompt went through the model with an earlier micro-batch."""
        return self._prefix is not None

    def check_prompt(self, prompt_ids: torch.Tensor, num_prompts: int) -> None:
        """
        Check the prompts of the rows of a micro-batch, of shape `(B, P)` and -1 where they are padded.

        Raises:
            RuntimeError: If they are not the one of the first micro-batch, or come behind the backward of the prompt.
        """
        if self._has_led_on:
            raise RuntimeError(
                "The last micro-batch of a prompt went through the model twice. On several processes, `prefix_sharing="
                "True` needs a `compute_loss` that computes it once, or a `per_device_train_batch_size` that is a "
                "multiple of `num_generations`."
            )
        if self._prompt_ids is None:
            self._prompt_ids = prompt_ids[:1]
        same_shape = prompt_ids.shape[1] == self._prompt_ids.shape[1]
        if num_prompts > 1 or not same_shape or (prompt_ids != self._prompt_ids).any():
            raise RuntimeError(
                f"A row of micro-batch {self.micro_batch + 1} of the {self.num_micro_batches} of a prompt has another "
                "prompt, so it is not one of the micro-batch that was generated. Where `compute_loss` sends rows of "
                "its own through the model, set `per_device_train_batch_size` to a multiple of `num_generations`."
            )

    def go_on(self, prefix: "SharedPrefix | None" = None) -> "SharedPrefix":
        """Prefix for the passes of the micro-batch. `prefix` is what the prompt left, if it went through with it."""
        if prefix is not None:
            prefix.end_here()
            self._prefix = prefix
        prefix = self._prefix
        if self.is_last and self.in_one_backward:
            prefix.lead_on()
            self._prefix, self._has_led_on = None, True
        return prefix

    def backward(self) -> None:
        """End of the micro-batch. If it was the last, backward of the prompt, unless it was part of its backward."""
        self.is_entered = False
        if self.is_last and self.has_prefix:
            prefix, self._prefix = self._prefix, None
            prefix.backward()
