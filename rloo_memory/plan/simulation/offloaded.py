"""Where saved activations are with `activation_offloading`."""

import contextlib

import torch

from rloo_memory.plan.simulation.live_bytes import LiveBytes


@contextlib.contextmanager
def offloaded(model, memory: LiveBytes):
    """With `activation_offloading`, tensors saved for the backward are on the host until they are needed.

    As TRL's OffloadActivations, whose `min_offload_size` is 1,024 bytes and `max_fwd_stash_size` 5: the last five
    are on the device, too, until they are copied, and what is saved again meanwhile stays there. What no backward
    asks for is kept to the end.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: list[tuple[torch.Tensor, bool] | None] = []  # and whether it is on the host
    leaving: dict[int, tuple[tuple, torch.Tensor]] = {}  # view of a storage, and the tensor, by index in `saved`
    last: dict[tuple, int] = {}  # of these and what was saved again: index by view

    def pack(tensor):
        storage, number = tensor.untyped_storage()._cdata, len(saved)
        view = storage, tensor.storage_offset(), tensor.dtype
        again = view in last
        if again:
            last[view] = number
        if again or storage in weights or tensor.numel() * tensor.element_size() < 1024:
            saved.append((tensor, False))
            return number
        for old in [each for each in leaving if each <= number - 5]:
            left, _ = leaving.pop(old)
            if last[left] == old:
                del last[left]
        last[view], leaving[number] = number, (view, tensor)
        with memory.of_kind("host"):
            saved.append((tensor.clone(), True))
        return number

    def unpack(number):
        last.clear()
        leaving.clear()
        tensor, on_host = saved[number]
        saved[number] = None
        return tensor.clone() if on_host else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    saved.clear()
