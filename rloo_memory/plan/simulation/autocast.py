"""Autocast as on CUDA, for tensors of a CPU: the operations that CUDA's list brings to float32 and the CPU's does not,
and those that the CPU's brings to one dtype and CUDA's leaves.

The list is that of `AT_FORALL_FP32` and its neighbours in aten/src/ATen/autocast_mode.h, as far as models use it.
"""

import contextlib
import functools
import warnings

import torch

IN_FLOAT32 = (
    "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "softplus", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "layer_norm", "group_norm",
)  # fmt: skip
GIVE_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum")  # by their argument `dtype`
LEFT = ("cat", "stack")
HALF = (torch.bfloat16, torch.float16)


def as_without(operation, *args, **kwargs):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operation(*args, **kwargs)


def in_float32(operation, *args, **kwargs):
    widened = [x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x for x in args]
    return as_without(operation, *widened, **kwargs)


def giving_float32(operation, *args, **kwargs):
    half = args[0].dtype in HALF and not any(isinstance(x, torch.dtype) for x in (*args, kwargs.get("dtype")))
    return as_without(operation, *args, **kwargs | ({"dtype": torch.float32} if half else {}))


@contextlib.contextmanager
def as_on_cuda():
    """Within it, `torch.autocast("cpu")` has CUDA's lists."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in (*IN_FLOAT32, *GIVE_FLOAT32, *LEFT):
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            runs = in_float32 if name in IN_FLOAT32 else giving_float32 if name in GIVE_FLOAT32 else as_without
            with warnings.catch_warnings(action="ignore"):  # that it takes the place of torch's
                library.impl(name, functools.partial(runs, operation), "AutocastCPU")
        yield
