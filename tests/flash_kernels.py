"""What kernels of flash attention compute, by PyTorch in float64, for devices and packages that are not here."""

import torch

WITHOUT_END = (-1, -1)  # a window: how many keys a query sees to the left of its own and to the right


def hidden_keys(queries: int, keys: int, causal, window):
    """(Q, K), of a sequence. Its last query and its last key are side by side; if `causal` is "first", the first are
    for that."""
    back = torch.arange(queries)[:, None] - torch.arange(keys)
    hidden = (back + (0 if causal == "first" else keys - queries) < 0) & bool(causal)
    back = back + keys - queries
    for size, distance in zip(window, (back, -back), strict=True):
        if size >= 0:
            hidden |= distance > size
    return hidden


def scores_of(query, key, scale=None, causal=False, window=WITHOUT_END, softcap=0.0, bias=None):
    """(B, H, Q, K) in float64, -inf where a query does not see a key."""
    scores = query.double() @ key.double().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden_keys(*scores.shape[-2:], causal, window), -torch.inf)
    return scores if bias is None else scores + bias.double()


def attend(query, key, value, sink=None, **about):
    """(output, log-sum-exp) of (B, H, Q, D) over (B, Hk, K, D); `about` is of [`scores_of`]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = beside = scores_of(query, key, **about)
    if sink is not None:
        beside = torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    lse = beside.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num(0.0) @ value.double(), lse


def attend_backward(grad, query, key, value, out, lse, scale=None, **about):
    """Gradients of query, key, value and bias."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    weights = (scores_of(query, keys, scale, **about) - lse.double()[..., None]).exp().nan_to_num(0.0)
    grad = grad.double()
    of_scores = weights * (grad @ values.transpose(-1, -2) - (grad * out.double()).sum(-1, keepdim=True))
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def fold(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    of_key = fold(of_scores.transpose(-1, -2) @ query.double() * scale)
    return of_scores @ keys * scale, of_key, fold(weights.transpose(-1, -2) @ grad), of_scores


def heads_first(*tensors):
    """(B, T, H, D) as (B, H, T, D), and back; a packed run (T, H, D) as a batch of one."""
    return [(x if x.dim() == 4 else x[None]).transpose(1, 2) for x in tensors]


def runs(bounds_q, bounds_k, max_q, max_k):
    """Slices of queries and keys of each packed run, from cumulative lengths."""
    ends = bounds_q.tolist(), bounds_k.tolist()
    found = [[slice(*pair) for pair in zip(each, each[1:], strict=False)] for each in ends]
    for mine, theirs in zip(*found, strict=True):
        assert max_q >= mine.stop - mine.start and max_k >= theirs.stop - theirs.start
        yield mine, theirs


def flash_forward(query, key, value, bounds_q, bounds_k, max_q, max_k, **about):
    """(output, log-sum-exp) of rows (B, T, H, D), or of packed runs (T, H, D) with the bounds of each."""
    if bounds_q is None:
        out, lse = attend(*heads_first(query, key, value), **about)
        return out.transpose(1, 2), lse
    assert bounds_q[-1] == len(query) and bounds_k[-1] == len(key), (bounds_q, bounds_k, query.shape, key.shape)
    found = [
        attend(*heads_first(query[mine], key[theirs], value[theirs]), **about)
        for mine, theirs in runs(bounds_q, bounds_k, max_q, max_k)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 2)[0].transpose(0, 1), torch.cat(lses, 2)[0]


def flash_backward(grad, query, key, value, out, lse, bounds_q, bounds_k, max_q, max_k, **about):
    """Gradients of query, key and value, in their layout."""
    if bounds_q is None:
        found = attend_backward(*heads_first(grad, query, key, value, out), lse, **about)[:3]
        return tuple(heads_first(*found))
    found = []
    for mine, theirs in runs(bounds_q, bounds_k, max_q, max_k):
        tensors = heads_first(grad[mine], query[mine], key[theirs], value[theirs], out[mine])
        found.append(attend_backward(*tensors, lse[:, mine][None], **about)[:3])
    return tuple(torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*found, strict=True))
