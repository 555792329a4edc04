"""
Attention to a shared prefix without a mask: one kernel for each part of the prefix, one for what is behind it, and their
outputs merged by the log-sum-exp of the scores.

Shape suffixes: B rows, S prefix tokens, T tokens of a packed pass, Q queries, K keys, H heads, G query heads that read
the same key head, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .passes import to_device


# Beside scale, sink and dropout, what changes attention, or what `sdpa` refuses
_OTHER_ARGUMENTS = ("softcap", "position_bias", "cache")

# FlashAttention-2 has no kernel for larger heads
_MAX_HEAD_SIZE_ON_CUDA = 256


@dataclass(frozen=True)
class Runs:
    """
    Runs of tokens that lie one after another in a row, and attend causally, each to itself.

    Args:
        lengths (`list[int]`):
            Number of tokens of each.
        starts (`torch.Tensor` of shape `(len(lengths) + 1,)`):
            Where each of them begins, and where the last one ends.
    """

    lengths: list[int]
    starts: torch.Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Runs":
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, to_device(starts, device))


def _fold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`(B, H, Q, ...)` as `(B, H / G, G * Q, ...)`: the query heads of a key head become more queries of it."""
    return x.unflatten(1, (-1, num_groups)).flatten(2, 3)


def _unfold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    x = x.unflatten(2, (num_groups, -1)).movedim(3, 1)  # (B, Q, H / G, G, ...)
    return x.flatten(2, 3).transpose(1, 2)


def _batch(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`(B, H, Q, ...)` as `(B * G, H / G, Q, ...)`: more rows, where each query may see other keys."""
    return x.unflatten(1, (-1, num_groups)).transpose(1, 2).flatten(0, 1)


def _unbatch(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    x = x.unflatten(0, (-1, num_groups)).movedim((3, 2), (1, 2))  # (B, Q, H / G, G, ...)
    return x.flatten(2, 3).transpose(1, 2)


def _repeat(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Keys `(B, H / G, K, D)` for the rows of [`_batch`], without a copy if B is 1."""
    return x.unsqueeze(1).expand(-1, num_groups, -1, -1, -1).flatten(0, 1)


# The kernels below take a query of shape (B, H, Q, D) and keys of fewer heads. With `runs`, of a single row, each run of
# tokens attends causally to itself, else all queries to all keys. The log-sum-exp has shape (B, H, Q).


def forward_on_cpu(query, key, value, runs: Runs | None, scale: float | None):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    num_groups = query.shape[1] // key.shape[1]
    if runs is None and num_groups == 1:  # as in decoding, where views take time, too
        return kernel(query, key, value, scale=scale)
    if runs is None:
        output, lse = kernel(_fold(query, num_groups), key, value, scale=scale)
        return _unfold(output, num_groups), _unfold(lse, num_groups)
    outputs, lses = [], []
    for run_query, run_key, run_value in zip(*(x.split(runs.lengths, 2) for x in (query, key, value)), strict=True):
        run_query, run_key, run_value = (
            _batch(run_query, num_groups), _repeat(run_key, num_groups), _repeat(run_value, num_groups)
        )  # fmt: skip
        output, lse = kernel(run_query, run_key, run_value, is_causal=True, scale=scale)
        outputs.append(_unbatch(output, num_groups).transpose(1, 2))
        lses.append(_unbatch(lse, num_groups))
    return torch.cat(outputs, dim=1).transpose(1, 2), torch.cat(lses, dim=2)


def backward_on_cpu(grad, query, key, value, output, lse, runs: Runs | None, scale: float | None):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    num_groups = query.shape[1] // key.shape[1]
    if runs is None:
        grad, query, output, lse = (_fold(x, num_groups) for x in (grad, query, output, lse))
        grad_query, *grads = kernel(grad, query, key, value, output, lse, 0.0, False, scale=scale)
        return _unfold(grad_query, num_groups), *grads
    grads = []
    for *of_queries, run_key, run_value in zip(
        *(x.split(runs.lengths, 2) for x in (grad, query, output, lse, key, value)), strict=True
    ):
        run_grad, run_query, run_output, run_lse = (_batch(x, num_groups) for x in of_queries)
        run_key, run_value = _repeat(run_key, num_groups), _repeat(run_value, num_groups)
        run_grads = kernel(run_grad, run_query, run_key, run_value, run_output, run_lse, 0.0, True, scale=scale)
        of_key, of_value = (x.unflatten(0, (-1, num_groups)).sum(1) for x in run_grads[1:])
        grads.append((_unbatch(run_grads[0], num_groups), of_key, of_value))
    return tuple(torch.cat(run_grads, dim=2) for run_grads in zip(*grads, strict=True))


def _lengths_on_cuda(query, key, runs: Runs | None) -> tuple:
    """Arguments of the kernels that say which tokens attend to each other, the last whether they do causally."""
    if runs is None:
        return None, None, query.shape[2], key.shape[2], 0.0, False
    # A bound, never 1: for single queries, the kernel mixes up the log-sum-exps of grouped heads of different runs
    longest = max(2, *runs.lengths)
    return runs.starts, runs.starts, longest, longest, 0.0, True


def forward_on_cuda(query, key, value, runs: Runs | None, scale: float | None):
    lengths = _lengths_on_cuda(query, key, runs)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if runs is not None:
        query, key, value = query[0], key[0], value[0]
    output, lse, *_ = torch.ops.aten._flash_attention_forward(query, key, value, *lengths, False, scale=scale)
    if runs is not None:
        output, lse = output[None], lse[None]
    return output.transpose(1, 2), lse


def backward_on_cuda(grad, query, key, value, output, lse, runs: Runs | None, scale: float | None):
    lengths = _lengths_on_cuda(query, key, runs)
    tensors = [*(x.transpose(1, 2) for x in (grad, query, key, value, output)), lse]
    if runs is not None:
        tensors = [x[0] for x in tensors]
    rng_state = torch.empty(0, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
    grads = torch.ops.aten._flash_attention_backward(*tensors, *lengths, rng_state, rng_state, scale=scale)
    if runs is not None:
        grads = (x[None] for x in grads)
    return tuple(x.transpose(1, 2) for x in grads)


def _forward(query, key, value, runs: Runs | None, scale: float | None):
    kernels = forward_on_cuda if query.device.type == "cuda" else forward_on_cpu
    return kernels(query, key, value, runs, scale)


def _backward(grad, query, key, value, output, lse, runs: Runs | None, scale: float | None):
    kernels = backward_on_cuda if query.device.type == "cuda" else backward_on_cpu
    return kernels(grad, query, key, value, output, lse, runs, scale)


class SharedPrefixAttention(torch.autograd.Function):
    """
    Attention of a packed pass: each query attends to all parts of the prefix, and causally to its own run.

    Softmax over all keys is a weighted mean of the softmax over each part, and the weights come from the log-sum-exps.
    The backward of each kernel is exact when it is given the output and the log-sum-exp of all: with them, it finds the
    probabilities and their mean gradient as they are in the softmax over all keys.

    A sink of a head takes its part of the softmax, too: it is a key of that score, and of value 0.
    """

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Runs,
        scale: float | None,
        sink: torch.Tensor | None,
        *prefix: torch.Tensor,
    ) -> torch.Tensor:
        output, lse = _forward(query, key, value, runs, scale)
        for prefix_key, prefix_value in _pairs(prefix):
            if prefix_key.shape[2] == 0:
                continue
            prefix_output, prefix_lse = _forward(query, prefix_key, prefix_value, None, scale)
            weight = torch.sigmoid(prefix_lse - lse)[..., None]
            output = torch.lerp(output.to(lse.dtype), prefix_output.to(lse.dtype), weight).to(query.dtype)
            lse = torch.logaddexp(lse, prefix_lse)
        if sink is not None:
            scores = sink.to(lse.dtype)[:, None]
            output, lse = beside_sink(output, lse, scores), torch.logaddexp(lse, scores)
        ctx.save_for_backward(output, lse, query, key, value, sink, *prefix)
        ctx.runs, ctx.scale = runs, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, lse, query, key, value, sink, *prefix = ctx.saved_tensors
        of_query, *grads = _backward(grad, query, key, value, output, lse, ctx.runs, ctx.scale)
        prefix_grads = []
        for prefix_key, prefix_value in _pairs(prefix):
            if prefix_key.shape[2] == 0:
                prefix_grads += [torch.zeros_like(prefix_key), torch.zeros_like(prefix_value)]
                continue
            more, *of_part = _backward(grad, query, prefix_key, prefix_value, output, lse, None, ctx.scale)
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


def _pairs(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Key and value of each part of a prefix, which lie behind one another."""
    return zip(tensors[::2], tensors[1::2], strict=True)


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention and the log-sum-exp of its scores, without gradients.

    Queries have shape `(B, H, Q, D)`, keys and values, of which [`kernels_take`] says that they can be attended to,
    `(B, H / G, K, D)`, the output `(B, H, Q, D)` and the log-sum-exp `(B, H, Q)`. With `is_causal`, each query of a
    single row attends to the keys up to its own place only.
    """
    runs = Runs.of([query.shape[2]], query.device) if is_causal else None
    return _forward(query, key, value, runs, scale)


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
) -> torch.Tensor:
    """
    [`SharedPrefixAttention`] in the dtype that `sdpa` computes in, of queries of a pass of shape `(1, H, T, D)` to its
    keys and values `(1, H / G, T, D)` and those of each part of the prefix `(1, H / G, S, D)`. The heads of values may
    be smaller than those of keys. A sink has a score for each head, `(H,)`. The output has shape `(1, T, H, D)`.
    """
    dtype, head_size, value_size = _compute_dtype(value), key.shape[-1], value.shape[-1]
    padding = (0, head_size - value_size)

    def padded(value: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(value, padding) if any(padding) else value

    parts = [x for part_key, part_value in prefix for x in (part_key, padded(part_value))]
    query, key, value, *parts = (x.to(dtype) for x in (query, key, padded(value), *parts))
    output = SharedPrefixAttention.apply(query, key, value, runs, scale, sink, *parts)
    return output[..., :value_size].transpose(1, 2).contiguous()
