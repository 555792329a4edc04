"""Shared prompts through the kernels of CUDA, put in PyTorch for a CPU, against whole sequences in float64.

What stands in for `aten._flash_attention_forward` and its backward takes what FlashAttention-2 takes and refuses what
that refuses. Where a batch has single queries of grouped heads, it gives the log-sum-exp in the order in which that
does (`mha_varlen_fwd` of PyTorch 2.13). Prints the relative errors of output and gradients by setting, and how often
each of the two ran.
"""

import json

import torch

from rloo_memory.prefix_sharing import kernels as prefix_kernels
from rloo_memory.prefix_sharing.attention import attention_with_lse, shared_prefix_attention
from rloo_memory.prefix_sharing.kernels import Runs

CALLS = {"forward": 0, "backward": 0}
SETTINGS = {  # heads, key heads, head size of values, prefix tokens, tokens of each completion
    "ragged": (4, 2, 16, 7, [3, 1, 5]), "single tokens": (4, 2, 16, 9, [1, 1, 1]), "one token": (4, 1, 16, 1, [1]),
    "no prefix": (4, 4, 16, 0, [3, 4]), "small values": (4, 2, 8, 6, [4, 2]),
}  # fmt: skip
WINDOWS = {  # the same, and tokens that a window holds: shorter than prefix, completions or both, or than neither
    "window": (4, 2, 16, 9, [3, 1, 5], 4), "of two tokens": (4, 1, 16, 9, [3, 1], 2),
    "longer than completions": (4, 2, 16, 20, [3, 1, 5], 9), "longer than the prefix": (4, 2, 16, 5, [3, 20], 9),
    "longer than all": (4, 2, 16, 5, [3, 2], 40), "no prefix behind a window": (4, 4, 16, 0, [3, 4], 3),
}  # fmt: skip


def scores_of(query, key, starts_q, starts_k, is_causal, scale, left, right):
    """(H, Q, K) of packed tokens, -inf between sequences and outside of windows. The ends of a sequence of queries and
    of its keys are side by side."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    rows_q, rows_k = (
        torch.arange(len(x) - 1).repeat_interleave(x.diff().long(), output_size=len(y))
        for x, y in ((starts_q, query), (starts_k, key))
    )
    mask = rows_q[:, None] == rows_k[None, :]
    places_q, places_k = (
        torch.arange(len(x)) - ends[1:][rows] for x, ends, rows in ((query, starts_q, rows_q), (key, starts_k, rows_k))
    )
    back = places_q[:, None] - places_k[None, :]
    if is_causal or right >= 0:
        mask &= back >= (0 if is_causal else -right)
    if left >= 0:
        mask &= back <= left
    return scores.masked_fill(~mask, -torch.inf)


def check(query, key, value, starts_q, starts_k, max_q, max_k):
    assert query.dim() == key.dim() == 3 and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0 and all(x.stride(-1) == 1 for x in (query, key, value))
    for starts, most, tokens in ((starts_q, max_q, query), (starts_k, max_k, key)):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[-1] == len(tokens)
        assert starts.diff().max() <= most and starts.diff().min() > 0


def packed(x, starts):
    """Without starts, rows of one length."""
    return x.flatten(0, 1) if starts is None else x


def starts_of(x, starts):
    return torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] if starts is None else starts


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None, **more,
):  # fmt: skip
    CALLS["forward"] += 1
    assert dropout_p == 0 and not debug and not any(x is not None for x in more.values())
    windows = [-1 if x is None else x for x in (window_size_left, window_size_right)]
    shape, starts = query.shape, (starts_of(query, cum_seq_q), starts_of(key, cum_seq_k))
    query, key, value = (packed(x, cum_seq_q) for x in (query, key, value))
    check(query, key, value, *starts, max_q, max_k)
    num_groups = query.shape[1] // key.shape[1]
    scores = scores_of(query, key, *starts, is_causal, scale or query.shape[-1] ** -0.5, *windows)
    lse = scores.logsumexp(-1)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), value.repeat_interleave(num_groups, dim=1))
    if max_q == 1 and num_groups > 1 and cum_seq_q is not None:
        lse = lse.unflatten(0, (-1, num_groups)).transpose(1, 2).reshape(lse.shape)
    if cum_seq_q is None:
        lse = lse.unflatten(1, (shape[0], -1)).transpose(0, 1).contiguous()
    nothing = query.new_empty(0)
    return output.reshape(shape), lse, nothing, nothing, nothing


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    CALLS["backward"] += 1
    windows = [-1 if x is None else x for x in (window_size_left, window_size_right)]
    assert logsumexp.is_contiguous() and dropout_p == 0
    shapes, starts = (query.shape, key.shape, value.shape), (starts_of(query, cum_seq_q), starts_of(key, cum_seq_k))
    grad, query, key, value, out = (packed(x, cum_seq_q) for x in (grad_out, query, key, value, out))
    check(query, key, value, *starts, max_q, max_k)
    if cum_seq_q is None:
        logsumexp = logsumexp.transpose(0, 1).flatten(1, 2)
    num_groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    probs = (scores_of(query, key, *starts, is_causal, scale, *windows) - logsumexp[..., None]).exp()
    of_probs = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(num_groups, dim=1))
    of_scores = probs * (of_probs - (grad * out).sum(-1).T[..., None]) * scale
    grad_query = torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(num_groups, dim=1))
    grad_key, grad_value = (
        torch.einsum("hqk,qhd->khd", x, y).unflatten(1, (-1, num_groups)).sum(2)
        for x, y in ((of_scores, query), (probs, grad))
    )
    grads = zip((grad_query, grad_key, grad_value), shapes, strict=True)
    return tuple(x.reshape(shape) for x, shape in grads)


def error(got, expected):
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def errors_of(num_heads, num_key_heads, value_size, num_prefix_tokens, lengths, window=None):
    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = [(num_heads, tokens, 16), (num_key_heads, tokens, 16), (num_key_heads, tokens, value_size)]
    shapes += [(num_key_heads, num_prefix_tokens, 16), (num_key_heads, num_prefix_tokens, value_size)]
    tensors = [torch.randn(1, n, h, d).transpose(1, 2).requires_grad_() for h, n, d in shapes]
    weights = torch.randn(1, tokens, num_heads, value_size)
    results = []
    for kernels in (ON_CPU, ON_CUDA):
        prefix_kernels.forward_on_cpu, prefix_kernels.backward_on_cpu = kernels
        output = shared_prefix_attention(*tensors[:3], [tensors[3:]], Runs.of(lengths, "cpu"), 0.3, window=window)
        results.append((output, *torch.autograd.grad(output, tensors, weights)))
    return [error(x, y) for x, y in zip(*reversed(results), strict=True)]


def errors_of_rows(is_causal, num_rows):
    torch.manual_seed(0)
    tensors = [torch.randn(num_rows, heads, 5, 16) for heads in (4, 2, 2)]
    results = []
    for kernels in (ON_CPU, ON_CUDA):
        prefix_kernels.forward_on_cpu, prefix_kernels.backward_on_cpu = kernels
        results.append(attention_with_lse(*tensors, is_causal, None))
    return [error(x, y) for x, y in zip(*reversed(results), strict=True)]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    ON_CPU = prefix_kernels.forward_on_cpu, prefix_kernels.backward_on_cpu
    ON_CUDA = prefix_kernels.forward_on_cuda, prefix_kernels.backward_on_cuda
    errors = {name: errors_of(*shape) for name, shape in (SETTINGS | WINDOWS).items()}
    errors["rows"] = errors_of_rows(is_causal=False, num_rows=3)
    errors["one causal row"] = errors_of_rows(is_causal=True, num_rows=1)
    print(json.dumps({"errors": errors, "calls": CALLS}))
