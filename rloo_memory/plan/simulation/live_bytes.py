"""How many bytes of tensors are alive, by kind: counted at every operation, with values or without.

torch counts only its CUDA allocator's bytes. This counts storages on any device the same way, so a prediction made
on tensors without values and a training measured on a CPU can be compared. What a kernel allocates for itself inside
one operation is not seen.

Counting must not change what is counted. In a backward, autograd works in place in tensors that nobody else holds, but
never while a dispatch mode is active: `as_without_mode` undoes that.
"""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rloo_memory.calls import replaced

# What autograd does in place in a tensor that only it holds, but not while a dispatch mode is active
_ATEN = torch.ops.aten
IN_PLACE = {
    _ATEN.add.Tensor: _ATEN.add_.Tensor,  # the gradients of a tensor's several uses (autograd/input_buffer.cpp)
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,  # into zeros: the backward of gather (FunctionsManual.cpp)
    _ATEN.index_put.default: _ATEN.index_put_.default,  # of indexing
    _ATEN.scatter.value: _ATEN.scatter_.value,
    _ATEN.scatter.src: _ATEN.scatter_.src,  # of max, and its like
}
# References to such a tensor, as a dispatch mode sees it: that of its holder, and those of the call. In an operation
# that somebody's own backward calls from Python, there is another number
HELD_ONCE, STORAGE_HELD_ONCE = 4, 2


def as_without_mode(func, args: tuple):
    """The operation that autograd calls in a backward without a dispatch mode."""
    if func not in IN_PLACE or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return func
    first, last = args[0], args[-1]
    same = not (isinstance(last, torch.Tensor) and func is _ATEN.add.Tensor) or last.shape == first.shape
    if not same or first._use_count() != HELD_ONCE or not first.is_contiguous():
        return func
    alone = torch._C._storage_Use_Count(first.untyped_storage()._cdata) == STORAGE_HELD_ONCE
    return IN_PLACE[func] if alone else func


class LiveBytes(TorchDispatchMode):
    """Counts storages created by operations inside the `with` block, and those given to `add`.

    `live` is bytes by kind now, `total` their sum without the kind "host", and `at_peak` what `live` was when `total`
    was largest since `reset`, but of "host" the most since then, whenever that was. A new storage is of the kind that
    `kind` names. In a backward, a tensor in the shape of a watched weight is a gradient on its way to the parameter.
    """

    def __init__(self):
        super().__init__()
        self.kind = "activations"
        self.weight_shapes: set[torch.Size] = set()
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        # storage -> (kind, bytes, what keeps the callback alive)
        self.sizes: dict[int, tuple[str, int, weakref.ref]] = {}
        self.added = lambda operation: None  # called with the last operation when a storage was added
        self.operation = None  # the last one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = as_without_mode(func, args)
        result = func(*args, **(kwargs or {}))
        self.count(func, result)
        return result

    def count(self, func, result) -> None:
        """Count what the operation gave."""
        self.operation = func
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.sizes:
                backward = torch._C._current_graph_task_id() != -1
                self.add(leaf, "gradients" if backward and leaf.shape in self.weight_shapes else self.kind)

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the tensor's storage, which is not counted yet, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.sizes[key] = (kind, size, weakref.ref(storage, lambda _: self.remove(key)))
        self.live[kind] += size
        self.total += size if kind != "host" else 0
        most_on_host = max(self.at_peak.get("host", 0), self.live["host"])
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)
        self.at_peak["host"] = most_on_host
        self.added(self.operation)

    def remove(self, key: int) -> None:
        """Stop counting a storage: it was freed, or it left the device."""
        if key in self.sizes:
            kind, size, _ = self.sizes.pop(key)
            self.live[kind] -= size
            self.total -= size if kind != "host" else 0

    def rename(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the tensor's storage as another kind from now on, or count it if it was not."""
        self.remove(tensor.untyped_storage()._cdata)
        self.add(tensor, kind)

    def of_kind(self, kind: str):
        """Within it, new storages are of that kind."""
        return replaced(self, "kind", kind)

    def watch(self, model: torch.nn.Module, kind: str = "parameters") -> None:
        """Count the parameters and buffers as `kind`, and the gradients of weights that are trained."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.rename(tensor, kind)
        for parameter in model.parameters():
            if parameter.requires_grad and kind == "parameters":
                self.weight_shapes.add(parameter.shape)

    def reset(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak, self.at_peak = self.total, dict(self.live)
