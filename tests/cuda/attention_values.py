"""What operators compute that exist on CUDA alone: attention's kernels, and a product with another dtype for its sum.

Each function takes `real`, what the operator returned on the device and no kernel has filled, and the operator's own
arguments; it writes the values, which are computed in float64."""

import torch
from emulate import host, put

from tests import flash_kernels

aten = torch.ops.aten


def window_of(arguments):
    sizes = (arguments.get(f"window_size_{side}") for side in ("left", "right"))
    return tuple(-1 if size is None else size for size in sizes)


def flash_forward(
    real, query, key, value, bounds_q, bounds_k, max_q, max_k, dropout, causal, debug, *, scale=None, **kw
):
    tensors = map(host, (query, key, value, bounds_q, bounds_k))
    about = {"scale": scale, "causal": causal, "window": window_of(kw)}
    for into, values in zip(real, flash_kernels.flash_forward(*tensors, max_q, max_k, **about), strict=False):
        put(into, values)


def flash_backward(
    real, grad, query, key, value, out, lse, bounds_q, bounds_k, max_q, max_k, dropout, causal, *_, scale=None, **kw
):
    tensors = map(host, (grad, query, key, value, out, lse, bounds_q, bounds_k))
    about = {"scale": scale, "causal": causal, "window": window_of(kw)}
    for into, values in zip(real, flash_kernels.flash_backward(*tensors, max_q, max_k, **about), strict=False):
        put(into, values)


def sdpa_forward(real, query, key, value, bias, causal, scale):
    out, lse = flash_kernels.attend(
        *map(host, (query, key, value)), bias=host(bias), scale=scale, causal="first" if causal else False
    )
    put(real[0], out)
    if real[1].numel():  # padded to whole blocks by one of the kernels
        host(real[1])[..., : query.shape[2]] = lse.to(real[1].dtype)


def sdpa_backward(real, grad, query, key, value, bias, out, lse, causal, scale):
    tensors = *map(host, (grad, query, key, value, out)), host(lse)[..., : query.shape[2]]
    about = {"scale": scale, "causal": "first" if causal else False, "bias": host(bias)}
    found = flash_kernels.attend_backward(*tensors, **about)
    for into, value in zip(real, found, strict=False):
        if into is not None:
            put(into, value)


def sdpa_flash_forward(real, q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    sdpa_forward(real, q, k, v, None, causal, scale)


def sdpa_flash_backward(real, grad, q, k, v, out, lse, bq, bk, mq, mk, dropout, causal, seed, offset, *, scale=None):
    sdpa_backward(real[:3], grad, q, k, v, None, out, lse, causal, scale)


def sdpa_efficient_forward(real, q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    sdpa_forward(real, q, k, v, bias, causal, scale)


def sdpa_efficient_backward(
    real, grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None
):
    sdpa_backward(real, grad, q, k, v, bias, out, lse, causal, scale)


def addmm_in_dtype(real, added, a, b, dtype, *, beta=1, alpha=1, out=None):
    put(real if out is None else out, host(added).float() * beta + host(a).float() @ host(b).float() * alpha)


VALUES = {
    aten.addmm.dtype: addmm_in_dtype,
    aten.addmm.dtype_out: addmm_in_dtype,
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_flash_attention.default: sdpa_flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: sdpa_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: sdpa_efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: sdpa_efficient_backward,
}
