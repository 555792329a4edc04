"""TRL's activation offloading where there is no accelerator: the CPU stands for one, and for the CPU.

What is saved is copied, kept by number, and taken once, all by TRL's own code. There are no streams and no pinned
memory, so nothing is said about when a copy is made.
"""

from types import SimpleNamespace
from unittest import mock

import torch


def get_act_offloading_ctx_manager(model):
    """In place of the function of this name that the trainers call."""
    from trl.models import activation_offloading

    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")):
        manager = activation_offloading.get_act_offloading_ctx_manager(
            model, use_pin_memory=False, use_streams=False
        )
    manager.device_module = SimpleNamespace(**vars(torch.cpu), empty_cache=lambda: None)  # which `torch.cpu` lacks
    return manager
