"""TRL's activation offloading where there is no accelerator: the CPU stands for one, and for the CPU.

What is saved is copied, kept by number, and taken once, all by TRL's own code. Nothing is pinned, and streams do
nothing, so nothing is said about when a copy is made.
"""

from types import SimpleNamespace
from unittest import mock

import torch


class Stream(torch.cpu.Stream):
    def synchronize(self) -> None:
        """What runs on a CPU is done."""


def get_act_offloading_ctx_manager(model, use_streams=False):
    """In place of the function of this name that the trainers call. With `use_streams`, what is kept until it is
    copied is as on an accelerator; a backward is not possible."""
    from trl.models import activation_offloading

    stream = Stream()
    device = SimpleNamespace(
        Stream=Stream, current_stream=lambda: stream, stream=torch.cpu.stream, empty_cache=lambda: None
    )
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")),
        mock.patch.object(torch, "get_device_module", lambda name: device),
    ):
        return activation_offloading.get_act_offloading_ctx_manager(
            model, use_pin_memory=False, use_streams=use_streams
        )
