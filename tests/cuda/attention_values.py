"""What operators compute that exist on CUDA alone: attention's kernels, and a product with another dtype for its sum.

Each function takes `real`, what the operator returned on the device and no kernel has filled, and the operator's own
arguments; it writes the values, which are computed in float64."""

import math

import torch
from emulate import host, put

aten = torch.ops.aten


def scores_of(query, key, scale, causal, bias, window=(-1, -1)):
    """(B, H, Q, K) in float64; the causal mask stands at the lower right ("bottom") or at the upper left (True). A
    window, of keys on the left and on the right of a query, stands at the lower right; -1 is without an end."""
    scores = query.double() @ key.double().transpose(-1, -2)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = scores.shape[-2:]
    if causal and queries:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if causal == "bottom" else 0)
        scores = scores.masked_fill(~seen, -math.inf)
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    for size, distance in zip(window, (back, -back), strict=True):
        if size >= 0:
            scores = scores.masked_fill(distance > size, -math.inf)
    return scores if bias is None else scores + bias.double()


def attend(query, key, value, scale, causal, bias=None, window=(-1, -1)):
    """(output, log-sum-exp) of (B, H, Q, D) over (B, Hk, K, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scores_of(query, key, scale, causal, bias, window)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num(0.0) @ value.double(), lse


def attend_backward(grad, query, key, value, out, lse, scale, causal, bias=None, window=(-1, -1)):
    """Gradients of query, key, value and bias."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = scores_of(query, keys, scale, causal, bias, window)
    weights = (scores - lse.double()[..., None]).exp().nan_to_num(0.0)
    grad = grad.double()
    of_scores = weights * (grad @ values.transpose(-1, -2) - (grad * out.double()).sum(-1, keepdim=True))
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def fold(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    of_key = fold(of_scores.transpose(-1, -2) @ query.double() * scale)
    return of_scores @ keys * scale, of_key, fold(weights.transpose(-1, -2) @ grad), of_scores


def runs(bounds_q, bounds_k):
    """Slices of queries and keys of each packed sequence, from cumulative lengths."""
    q, k = host(bounds_q).tolist(), host(bounds_k).tolist()
    return [
        (slice(*x), slice(*y)) for x, y in zip(zip(q, q[1:], strict=False), zip(k, k[1:], strict=False), strict=True)
    ]


def window_of(arguments):
    sizes = (arguments.get(f"window_size_{side}") for side in ("left", "right"))
    return tuple(-1 if size is None else size for size in sizes)


def flash_forward(
    real, query, key, value, bounds_q, bounds_k, max_q, max_k, dropout, causal, debug, *, scale=None, **kw
):
    """(B, T, H, D), or packed (T, H, D) with the bounds of sequences."""
    q, k, v = host(query), host(key), host(value)
    causal, window = "bottom" if causal else False, window_of(kw)
    if bounds_q is None:
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal, window=window)
        put(real[0], out.transpose(1, 2))
        put(real[1], lse)
        return
    pieces = runs(bounds_q, bounds_k)
    assert pieces[-1][0].stop == q.shape[0] and pieces[-1][1].stop == k.shape[0], (pieces[-1], q.shape, k.shape)
    for mine, theirs in pieces:
        assert max_q >= mine.stop - mine.start and max_k >= theirs.stop - theirs.start
        pieces = (x.transpose(0, 1)[None] for x in (q[mine], k[theirs], v[theirs]))
        out, lse = attend(*pieces, scale, causal, window=window)
        host(real[0])[mine] = out[0].transpose(0, 1).to(real[0].dtype)
        host(real[1])[:, mine] = lse[0].float()


def flash_backward(
    real, grad, query, key, value, out, lse, bounds_q, bounds_k, max_q, max_k, dropout, causal, *_, scale=None, **kw
):
    g, q, k, v, o, lse = map(host, (grad, query, key, value, out, lse))
    causal, window = "bottom" if causal else False, window_of(kw)
    if bounds_q is None:
        found = attend_backward(*(x.transpose(1, 2) for x in (g, q, k, v, o)), lse, scale, causal, window=window)
        for into, value in zip(real, found[:3], strict=False):
            put(into, value.transpose(1, 2))
        return
    for mine, theirs in runs(bounds_q, bounds_k):
        pieces = (x.transpose(0, 1)[None] for x in (g[mine], q[mine], k[theirs], v[theirs], o[mine]))
        found = attend_backward(*pieces, lse[:, mine][None], scale, causal, window=window)
        for into, where, value in zip(real, (mine, theirs, theirs), found[:3], strict=False):
            host(into)[where] = value[0].transpose(0, 1).to(into.dtype)


def sdpa_forward(real, query, key, value, bias, causal, scale):
    out, lse = attend(host(query), host(key), host(value), scale, causal, None if bias is None else host(bias))
    put(real[0], out)
    if real[1].numel():  # padded to whole blocks by one of the kernels
        host(real[1])[..., : query.shape[2]] = lse.to(real[1].dtype)


def sdpa_backward(real, grad, query, key, value, bias, out, lse, causal, scale):
    bias = None if bias is None else host(bias)
    lse = host(lse)[..., : query.shape[2]]
    found = attend_backward(*map(host, (grad, query, key, value, out)), lse, scale, causal, bias)
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
