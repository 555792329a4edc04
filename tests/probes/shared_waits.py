"""How often the host waits for a device while shared prompts are scored or trained, counted without a device.

All tensors lie on a CPU, but they say `cpu:0` of their device, which stands for an accelerator, unless they were made
on `cpu` or copied there. Reading a value of a tensor on the device, or making one whose shape depends on values there,
is a wait. Prints by setting the lines that waited, of the fork's own code and of the model, in forward and backward.
"""

import json
import sys
import traceback
from unittest import mock

import tiny
import torch
from shared_exactness import passes_of  # builds the fork and puts it on the path
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from trl.prefix_sharing.enabling import enable_prefix_sharing

DEPEND_ON_VALUES = (
    "_local_scalar_dense", "nonzero", "unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "masked_select", "repeat_interleave", "equal",
)  # fmt: skip
SETTINGS = {
    "together": dict(),
    "passes of 1": dict(tokens_per_forward=1),
    "passes of 9 tokens": dict(tokens_per_forward=9),
    "whole rows": dict(tokens_per_forward=30, prefix_sharing=False),
}


HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.host, self.places = WeakIdKeyDictionary(), []

    def on_host(self, x):
        return x in self.host

    def wait(self):
        frames = [
            f for f in traceback.extract_stack() if "/prefix_sharing/" in f.filename or "/transformers/" in f.filename
        ]
        own = frames and "/prefix_sharing/" in frames[-1].filename
        self.places.append(f"{frames[-1].filename.rsplit('/', 1)[1]}: {frames[-1].line}" if own else "model")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device")
        of_host = device is None or device.index is None
        if tensors and not (name == "_to_copy" and device is not None):
            # Lists that tensors are indexed with become tensors out of sight
            of_host = all(self.on_host(x) for x in (tensors[:1] if name == "index" else tensors))
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if not of_host and (name in DEPEND_ON_VALUES or by_mask):
            self.wait()
        result = func(*args, **kwargs)
        if of_host:
            self.keep(result)
        return result

    def keep(self, result):
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.host[x] = True

    def __enter__(self):
        to, tolist, tensor = torch.Tensor.to, torch.Tensor.tolist, torch.tensor

        def new_to(x, *args, **kwargs):
            result = to(x, *args, **kwargs)
            device = args[0] if args and isinstance(args[0], torch.device) else None
            if device is not None and self.on_host(x) != (device.index is None):
                result = result.clone()
                if device.index is None:
                    self.wait()
                    self.keep(result)
                else:
                    self.host.pop(result, None)
            return result

        def new_tolist(x):
            if not self.on_host(x):
                self.wait()
            return tolist(x)

        def new_tensor(*args, device=None, **kwargs):
            result = tensor(*args, **kwargs)
            if device is None or device.index is None:
                self.keep(result)
            return result.clone() if device is not None and device.index is not None else result

        self.patches = [
            mock.patch.object(torch.Tensor, "cpu", lambda x: new_to(x, HOST)),
            mock.patch.object(torch.Tensor, "to", new_to),
            mock.patch.object(torch.Tensor, "tolist", new_tolist),
            mock.patch.object(torch.Tensor, "device", property(lambda x: HOST if self.on_host(x) else DEVICE)),
            mock.patch.object(torch, "tensor", new_tensor),
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *args):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*args)


def count(settings):
    model = tiny.build_model().train()
    if settings.get("prefix_sharing", True):
        enable_prefix_sharing(model)
    ids, mask, prompt_length = tiny.build_batch()
    passes = passes_of(prompt_length, **settings)
    with Waits() as waits:
        output = passes.forward(model.model, ids, mask)
        forward, waits.places = waits.places, []
        output.last_hidden_state.sum().backward()
    by_part = {"forward": forward, "backward": waits.places}
    return {
        f"{part}, {whose}": sorted(place for place in places if (place == "model") == (whose == "model"))
        for part, places in by_part.items()
        for whose in ("own", "model")
    }


if __name__ == "__main__":
    result = {name: count(settings) for name, settings in SETTINGS.items()}
    print(json.dumps(result, indent=1 if "--long" in sys.argv else None))
