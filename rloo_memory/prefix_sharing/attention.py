"""
Attention to a shared prefix without a mask: one kernel for each part of the prefix, one for what is behind it, and
their outputs merged by the log-sum-exp of the scores.

Shape suffixes: B rows, S prefix tokens, T tokens of a packed pass, Q queries, K keys, H heads, G query heads that read
the same key head, D head size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from . import kernels
from .kernels import Runs, Seen

# Beside scale, sink and dropout, what changes attention, or what `sdpa` refuses
_OTHER_ARGUMENTS = ("softcap", "position_bias", "cache")

# FlashAttention-2 has no kernel for larger heads
_MAX_HEAD_SIZE_ON_CUDA = 256


class SharedPrefixAttention(torch.autograd.Function):
    """
    Attention of a packed pass: each query attends to all parts of the prefix, and causally to its own run.

    Softmax over all keys is a weighted mean of the softmax over each part, and the weights come from the log-sum-exps.
    The backward of each kernel is exact when it is given the output and the log-sum-exp of all: with them, it finds
    the probabilities and their mean gradient as they are in the softmax over all keys.

    A sink of a head takes its part of the softmax, too: it is a key of that score, and of value 0.
    """

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: Seen,
        scale: float | None,
        sink: torch.Tensor | None,
        *prefix: torch.Tensor,
    ) -> torch.Tensor:
        output, lse = kernels.forward(query, key, value, seen, scale)
        for prefix_key, prefix_value, seen_of_part in _parts(prefix, seen):
            if seen_of_part is not None and seen_of_part.reach == 0 or prefix_key.shape[2] == 0:
                continue
            prefix_output, prefix_lse = kernels.forward(query, prefix_key, prefix_value, seen_of_part, scale)
            weight = torch.sigmoid(prefix_lse - lse)[..., None]
            output = torch.lerp(output.to(lse.dtype), prefix_output.to(lse.dtype), weight)  # rounded once, below
            lse = torch.logaddexp(lse, prefix_lse)
        if sink is not None:
            scores = sink.to(lse.dtype)[:, None]
            output, lse = beside_sink(output.to(lse.dtype), lse, scores), torch.logaddexp(lse, scores)
        output = output.to(query.dtype)
        ctx.save_for_backward(output, lse, query, key, value, sink, *prefix)
        ctx.seen, ctx.scale = seen, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, lse, query, key, value, sink, *prefix = ctx.saved_tensors
        of_query, *grads = kernels.backward(grad, query, key, value, output, lse, ctx.seen, ctx.scale)
        prefix_grads = []
        for prefix_key, prefix_value, seen_of_part in _parts(prefix, ctx.seen):
            if seen_of_part is not None and seen_of_part.reach == 0 or prefix_key.shape[2] == 0:
                prefix_grads += [torch.zeros_like(prefix_key), torch.zeros_like(prefix_value)]
                continue
            more, *of_part = kernels.backward(
                grad, query, prefix_key, prefix_value, output, lse, seen_of_part, ctx.scale
            )
            of_query = of_query + more
            prefix_grads += of_part
        of_sink = None
        if sink is not None:
            probability = torch.exp(sink.to(lse.dtype)[:, None] - lse)
            of_sink = -(probability * (grad.to(lse.dtype) * output).sum(-1)).sum((0, 2)).to(sink.dtype)
        return of_query, *grads, None, None, of_sink, *prefix_grads


def beside_sink(output: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Attention to keys and a sink, a key of score `sink` and value 0, from output and log-sum-exp without it."""
    return output * torch.sigmoid(lse - sink)[..., None].to(output.dtype)


def _parts(prefix: Sequence[torch.Tensor], seen: Seen) -> Iterator[tuple[torch.Tensor, torch.Tensor, Seen | None]]:
    """Key and value of each part of a prefix, which lie behind one another, and what is seen of it if not all is."""
    distance = sum(x.shape[2] for x in prefix[::2])
    for key, value in zip(prefix[::2], prefix[1::2], strict=True):
        distance -= key.shape[2]
        yield key, value, None if seen.window is None else Seen(seen.runs, seen.window, distance)


def _compute_dtype(value: torch.Tensor) -> torch.dtype:
    # Attention is on autocast's list, the kernels behind it are not
    device = value.device.type
    autocast = torch.is_autocast_enabled(device) and value.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else value.dtype


def flash_attention_takes(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether FlashAttention has kernels for keys and values like these, on the GPUs that it has kernels for."""
    head_size = key.shape[-1]
    return (
        value.shape[-1] <= head_size <= _MAX_HEAD_SIZE_ON_CUDA
        and head_size % 8 == 0
        and _compute_dtype(value) in (torch.float16, torch.bfloat16)
    )


def kernels_take(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there are kernels for keys and values like these."""
    if key.device.type == "cpu":
        return value.shape[-1] <= key.shape[-1]  # smaller values are padded
    return (
        key.device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(key.device) >= (8, 0)
        and flash_attention_takes(key, value)
    )


def is_plain(arguments: dict) -> bool:
    """Whether attention that is called with these arguments is a softmax of scaled scores, and nothing else."""
    return not arguments.get("dropout") and all(arguments.get(name) is None for name in _OTHER_ARGUMENTS)


def shared_prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: list[tuple[torch.Tensor, torch.Tensor]],
    runs: Runs,
    scale: float | None,
    sink: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    [`SharedPrefixAttention`] in the dtype that `sdpa` computes in, of queries of a pass of shape `(1, H, T, D)` to its
    keys and values `(1, H / G, T, D)` and those of each part of the prefix `(1, H / G, S, D)`. The heads of values may
    be smaller than those of keys. A sink has a score for each head, `(H,)`. With a
    window, a query sees so many tokens, itself included. The output has shape `(1, T, H, D)`.
    """
    dtype, head_size, value_size = _compute_dtype(value), key.shape[-1], value.shape[-1]
    padding = (0, head_size - value_size)

    def padded(value: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(value, padding) if any(padding) else value

    parts = [x for part_key, part_value in prefix for x in (part_key, padded(part_value))]
    query, key, value, *parts = (x.to(dtype) for x in (query, key, padded(value), *parts))
    output = SharedPrefixAttention.apply(query, key, value, Seen(runs, window), scale, sink, *parts)
    return output[..., :value_size].transpose(1, 2).contiguous()
