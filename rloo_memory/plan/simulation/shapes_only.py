"""Tensors that have a shape but no values: operations on them compute nothing and take no memory.

This does what torch's `FakeTensorMode` does, for a CPU and without its generality, in a fraction of the time an
operation: a step of an 8B model is tens of thousands of them. The tensors are ordinary CPU tensors, so autograd,
autocast and `LiveBytes` treat them as real ones. Their storages all begin at one address that nothing reads or writes.
"""

import mmap
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rloo_memory.calls import replaced
from rloo_memory.plan.simulation.live_bytes import LiveBytes, as_without_mode
from rloo_memory.plan.simulation.work import Work

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
SPACE = 2**44  # bytes of address space, in which most tensors fit; no memory is reserved for it
SPACE_MAP = mmap.mmap(-1, SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
INDEX = torch.ops.aten.index.Tensor
# Of experts: on the meta device in bfloat16 only, elsewhere in any dtype
GROUPED_MM = torch.ops.aten._grouped_mm.default
ADDRESS = torch.frombuffer(SPACE_MAP, dtype=torch.uint8, count=1).data_ptr()


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that an operation gives."""

    dtype: torch.dtype
    sizes: torch.Size
    strides: tuple[int, ...]


class ShapesOnly(TorchDispatchMode):
    """Operations with a tensor that has no values give more of them; others are computed. Within `new()`, operations
    that create tensors create them without values.

    What an operation gives is worked out once, on the meta device, for arguments of the same shapes. Views are made by
    torch, and operations in place do nothing. An operation whose shapes depend on values is an error.

    `memory` counts what operations give, and `work` what they compute: one mode for all, because two take a fifth more
    time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's: its wrapper takes a tenth of the time
        return False

    def __init__(self, memory: LiveBytes, work: Work):
        super().__init__()
        self.memory, self.work = memory, work
        self.creating = False
        self.known: dict[tuple, object] = {}  # what an operation gives; None for a view of an argument

    def new(self):
        return replaced(self, "creating", True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = as_without_mode(func, args)
        result = self.given(func, args, kwargs or {})
        self.memory.count(func, result)
        return result

    def given(self, func, args: tuple, kwargs: dict):
        """What the operation gives."""
        if func is INDEX:
            args = (args[0], _places(args[1]))
        key, tensors = [func], []
        _describe((*args, *kwargs.items()), key, tensors)
        if not tensors:  # one that creates, in the dtype that is the default now
            key.append(torch.get_default_dtype())
        if not (any(map(_has_no_values, tensors)) if tensors else self.creating) or func.is_view:
            return func(*args, **kwargs)
        key = tuple(key)
        result = self.written_or_new(func, args, kwargs, key)
        self.work.operation(key, func, args, tensors, result)
        return result

    def written_or_new(self, func, args: tuple, kwargs: dict, key: tuple):
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        if key not in self.known:
            self.known[key] = _on_meta(func, args, kwargs)
        result = self.known[key]
        if isinstance(result, _Shape):
            return _tensor(result)
        if result is None:
            return func(*args, **kwargs)
        return tree_map(lambda each: _tensor(each) if isinstance(each, _Shape) else each, result)


def _has_no_values(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()  # that of an empty tensor is 0
    return ADDRESS <= address < ADDRESS + SPACE or tensor.untyped_storage().data_ptr() == ADDRESS


def _tensor(shape: _Shape) -> torch.Tensor:
    """A tensor without values, with a storage of its own."""
    length = 1  # of an empty tensor, too
    if all(shape.sizes):
        length += sum((size - 1) * stride for size, stride in zip(shape.sizes, shape.strides, strict=True))
    if (size := length * shape.dtype.itemsize) > SPACE:  # which torch does not look behind
        storage = torch._C._construct_storage_from_data_pointer(ADDRESS, torch.device("cpu"), size)
        return torch.empty(0, dtype=shape.dtype).set_(storage, 0, shape.sizes, shape.strides)
    return torch.frombuffer(SPACE_MAP, dtype=shape.dtype, count=length).as_strided(shape.sizes, shape.strides)


def _describe(values, key: list, tensors: list[torch.Tensor]) -> None:
    """Adds to `key` what decides the shapes that an operation gives, and to `tensors` its tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            key += value.dtype, value.shape, value.stride()
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            key.append(len(value))
            _describe(value, key, tensors)
        else:
            key += type(value), value  # 1, 1.0 and True are equal, but give different dtypes


def _places(indices) -> list:
    """Indices of an operation, in numbers in place of masks: how many a mask chooses is in its values."""
    places = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not _has_no_values(index)
        places += index.nonzero().unbind(1) if is_mask else [index]
    return places


def _on_meta(func, args: tuple, kwargs: dict):
    """What the operation gives on the meta device, described; None if it gives a view of an argument."""
    storages = set()

    def to_meta(value):
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, torch.Tensor):
            own = torch.bfloat16 if func is GROUPED_MM and value.is_floating_point() else value.dtype
            value = torch.empty_strided(value.shape, value.stride(), dtype=own, device="meta")
            storages.add(value.untyped_storage()._cdata)
        return value

    dtype = args[0].dtype if func is GROUPED_MM else None
    args, kwargs = tree_map(to_meta, (args, kwargs))
    result = func(*args, **kwargs, **({} if storages or "device" in kwargs else {"device": "meta"}))
    given = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    if any(each.untyped_storage()._cdata in storages for each in given):
        return None
    return tree_map(
        lambda x: _Shape(dtype or x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x, result
    )


def _written(func, args: tuple, kwargs: dict):
    """What an operation in place gives back: the tensors that it writes to."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [given[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    results = func._schema.returns
    if not results:
        return None
    if len(results) != len(written):
        raise NotImplementedError(f"{func}: an operation in place that also gives new tensors")
    return written[0] if len(results) == 1 else tuple(written)
