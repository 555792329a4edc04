"""Values for a CUDA device whose kernels do not run: every operator runs on "CUDA" for its checks and its allocations,
then on the host for its results, in the same memory (EMULATE=all), or only where all numbers are integers (ints)."""

import atexit
import collections
import ctypes
import functools
import json
import os
import sys
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
EMPTY = {  # there is nothing to compute
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.resize_.default, aten.set_.source_Storage, aten.record_stream.default,
    aten._fused_sdp_choice.default,
}  # fmt: skip
WAITS = {  # the size of their results depends on values: they wait for the device
    "nonzero", "nonzero_static", "masked_select", "masked_scatter_backward", "repeat_interleave", "equal", "bincount",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip
# By cuDNN, which is not there, or with counts that a kernel would have left in memory: results alone
HOST_ALONE = {"convolution", "convolution_backward", "prod", "embedding_dense_backward"}
# The host wants all of one dtype, where CUDA has statistics in float32, or does not count whole numbers
IN_FLOAT32 = {"native_layer_norm_backward", "histc"}
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
SMALL = 2**20  # elements


def tensors_in(tree) -> list[torch.Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def is_on_device(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


def host(x):
    """A CPU tensor in the same memory; what is not on the device as it is."""
    if not is_on_device(x):
        return x
    storage = x.untyped_storage()
    if not storage.nbytes() or not x.numel():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(raw, x.storage_offset(), x.size(), x.stride())


def widened(x):
    """On the host, in float32."""
    x = host(x)
    return x.float() if isinstance(x, torch.Tensor) else x


def put(x, values) -> None:
    if isinstance(x, torch.Tensor) and x.numel():
        host(x).copy_(values)


def uploaded(device: torch.device, x):
    """A tensor of the host in new memory of a device; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty(x.shape, dtype=x.dtype, device=device)
    put(made, x)
    return made


class Emulation(TorchDispatchMode):
    """`values`: all, ints (where arguments and results are integers alone). `waits` counts what waits for the device
    by kind and line, `unsupported` what the host could not compute, `operators` the calls."""

    def __init__(self, values: str):
        super().__init__()
        self.values = values
        self.waits, self.unsupported, self.operators = (collections.Counter() for _ in range(3))

    def clear(self) -> None:
        for counter in (self.waits, self.unsupported, self.operators):
            counter.clear()

    def wait(self, kind: str) -> None:
        packages = ("/trl/", "/transformers/", "/accelerate/", "/experiments/")
        lines = [f for f in traceback.extract_stack() if any(package in f.filename for package in packages)]
        place = "?"
        if lines:
            parts = lines[-1].filename.split("/")
            first = max(i for i, part in enumerate(parts) if f"/{part}/" in packages)
            place = f"{'/'.join(parts[first:])}:{lines[-1].lineno}"
        self.waits[kind, place] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if not any(map(is_on_device, given)) and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        upload = functools.partial(uploaded, next((x.device for x in given if is_on_device(x)), torch.device("cuda")))
        self.operators[name] += 1
        if name == "_local_scalar_dense":
            self.wait("item")
            return host(args[0]).item()
        if name in WAITS:
            self.wait(name)
            return tree_map(upload, func(*tree_map(host, args), **tree_map(host, kwargs)))
        if name in HOST_ALONE and (self.values == "all" or name == "prod"):
            return tree_map(upload, func(*tree_map(host, args), **tree_map(host, kwargs)))
        if name == "embedding_dense_backward":
            return args[0].new_empty(args[2], args[0].shape[-1])
        if name in INDEXED:
            args = (args[0], self.whole_numbers(args[1]), *args[2:])
        if name in ("_to_copy", "copy_"):
            self.see_copy(name, args, kwargs)
        real = func(*args, **kwargs)
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if func in EMPTY or is_view or name == "set_":
            return real
        if self.values != "all" and any(x.is_floating_point() for x in (*given, *tensors_in(real))):
            self.zero_integers(schema, real)
        elif func in self.known():
            self.known()[func](real, *args, **kwargs)
        else:
            self.compute(func, args, kwargs, real)
        return real

    @staticmethod
    def known():
        from attention_values import VALUES  # which needs `host` and `put`

        return VALUES

    def zero_integers(self, schema, real) -> None:
        """What follows from numbers that are not there is zero, not what lay there before."""
        if any(r.alias_info is not None for r in schema.returns):
            return
        for x in tensors_in(real):
            if is_on_device(x) and not x.is_floating_point() and x.numel() < SMALL:
                host(x).zero_()

    def compute(self, func, args, kwargs, real) -> None:
        kwargs = {k: None if isinstance(v, torch.Generator) else v for k, v in kwargs.items() if k != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args = [None if isinstance(x, torch.Generator) else x for x in args]
        wide = widened if func.overloadpacket.__name__ in IN_FLOAT32 else host
        try:
            values = func(*tree_map(wide, args), **tree_map(wide, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            self.unsupported[f"{func}: {str(error).splitlines()[0][:150]}"] += 1
            return
        returns = func._schema.returns
        if not returns or any(r.alias_info is not None and r.alias_info.is_write for r in returns):
            return  # written in place
        mine, theirs = tensors_in(real), tensors_in(values)
        if [x.shape for x in mine] != [x.shape for x in theirs]:
            self.unsupported[f"{func}: {[tuple(x.shape) for x in theirs]} for {[tuple(x.shape) for x in mine]}"] += 1
            return
        for x, value in zip(mine, theirs, strict=True):
            put(x, value)

    def whole_numbers(self, indices) -> list:
        """Boolean indices as the numbers that `nonzero` makes of them, which waits for the device."""
        found = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            self.wait("bool index")
            numbers = host(index).nonzero(as_tuple=True)
            found += map(functools.partial(uploaded, index.device), numbers) if is_on_device(index) else numbers
        return found

    def see_copy(self, name, args, kwargs) -> None:
        if name == "_to_copy":
            source, to = args[0], torch.device(kwargs.get("device") or args[0].device)
        else:
            source, to = args[1], args[0].device
        later = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
        if is_on_device(source) and to.type == "cpu":
            self.wait("to host, async" if later else "to host")
        elif source.device.type == "cpu" and to.type == "cuda" and source.numel() and not source.is_pinned():
            self.wait("from pageable memory, async" if later else "from pageable memory")


COUNTED = (  # the fields of runtime.cpp's `Counts`
    "launches", "blas", "to_host", "to_device", "on_device", "memset", "waits_stream", "waits_event", "waits_device",
)  # fmt: skip
library = ctypes.CDLL(None)
library.emulated_counts.restype = ctypes.POINTER(ctypes.c_long * len(COUNTED))
reset = library.emulated_reset


def counts() -> dict[str, int]:
    """Since the last `reset`."""
    return dict(zip(COUNTED, library.emulated_counts()[0], strict=True))


current: Emulation | None = None


def start(values: str) -> None:
    """For the rest of this process."""
    global current
    # Not emulated: cuDNN's kernels, which sdpa would take first, and its convolutions
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    shown = torch.Tensor.__repr__  # which leaves dispatch modes
    torch.Tensor.__repr__ = lambda self, **kwargs: shown(host(self.detach()) if is_on_device(self) else self, **kwargs)
    current = Emulation(values)
    current.__enter__()
    if path := os.environ.get("EMULATE_REPORT"):
        atexit.register(report, path)


def report(path: str) -> None:
    """Append what this process counted."""
    waits = {" at ".join(key): count for key, count in current.waits.most_common()}
    peaks = {}
    if torch.cuda.is_initialized():
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    line = {"argv": sys.argv, "counts": counts(), "waits": waits, "unsupported": current.unsupported, "peaks": peaks}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


if os.environ.get("EMULATE", "none") != "none":  # imported by sitecustomize.py, or before torch
    start(os.environ["EMULATE"])
