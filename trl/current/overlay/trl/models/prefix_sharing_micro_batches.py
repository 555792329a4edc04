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
    from .prefix_sharing import SharedPrefix


class OpenPrefix:
    """
    Prefix of the prompt whose completions are going through the model, micro-batch after micro-batch.

    Args:
        num_micro_batches (`int`):
            Number of consecutive micro-batches that hold the completions of a prompt.
        in_one_backward (`bool`, *optional*, defaults to `False`):
            Whether the last backward goes on through the prompt. Otherwise `backward` has to be called after each
            micro-batch.
    """

    def __init__(self, num_micro_batches: int, in_one_backward: bool = False):
        self.num_micro_batches = num_micro_batches
        self.in_one_backward = in_one_backward
        self.micro_batch = 0
        self._prompt_ids: torch.Tensor | None = None
        self._prefix: SharedPrefix | None = None
        self._lent: SharedPrefix | None = None

    def enter(self, step: int, updates: bool) -> None:
        """
        Go to the next micro-batch.

        Args:
            step (`int`):
                Number of micro-batches before this one.
            updates (`bool`):
                Whether the optimizer updates the weights after this one.

        Raises:
            RuntimeError: If the micro-batches of a prompt do not all belong to the same update.
        """
        self.micro_batch = step % self.num_micro_batches
        if self.micro_batch == 0:
            self._prompt_ids = self._prefix = self._lent = None
        elif self._prompt_ids is None:
            raise RuntimeError(
                f"Micro-batch {self.micro_batch + 1} of the {self.num_micro_batches} of a prompt does not follow its "
                "first one. After an interruption, create the trainer again and resume from a checkpoint."
            )
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
        Args:
            prompt_ids (`torch.Tensor` of shape `(B, P)`):
                Prompts of the rows of the micro-batch, -1 where they are padded.
            num_prompts (`int`):
                Number of different ones, images included.

        Raises:
            RuntimeError: If they are not the one of the first micro-batch.
        """
        if self.is_first:
            self._prompt_ids = prompt_ids[:1]
        same_shape = prompt_ids.shape[1] == self._prompt_ids.shape[1]
        if num_prompts > 1 or not same_shape or (prompt_ids != self._prompt_ids).any():
            raise RuntimeError(
                f"A row of micro-batch {self.micro_batch + 1} of the {self.num_micro_batches} of a prompt has another "
                "prompt. The completions of a prompt must follow one another."
            )

    def open(self, prefix: "SharedPrefix") -> None:
        self._prefix, self._lent = prefix, prefix.lend()

    def read(self) -> "SharedPrefix":
        """Prefix for the passes of the micro-batch."""
        if not self.is_last or not self.in_one_backward:
            return self._lent
        self._prefix.take_back(self._lent)
        return self._close()[0]

    def backward(self) -> None:
        """Backward of the prompt, if this was the last micro-batch and the prompt was not part of its backward."""
        if self.is_last and self.has_prefix:
            prefix, lent = self._close()
            prefix.backward(lent)

    def _close(self) -> tuple["SharedPrefix", "SharedPrefix"]:
        prefix, lent = self._prefix, self._lent
        self._prefix = self._lent = None
        return prefix, lent
