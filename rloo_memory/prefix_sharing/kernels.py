"""
The kernels that attend to a shared prefix and to what is behind it, PyTorch's flash attention for a CPU and for CUDA.

Shape suffixes: B rows, Q queries, K keys, H heads, G query heads that read the same key head, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .passes import to_device

# Queries of a run that go through a kernel for a CPU together if a window is shorter: calls take time, too
_MIN_TILE = 64


@dataclass(frozen=True)
class Runs:
    """Runs of tokens that lie one after another in a row, and attend causally, each to itself."""

    lengths: list[int]
    starts: torch.Tensor  # (len(lengths) + 1,), where each of them begins, and where the last one ends

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Runs":
        starts = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        return cls(lengths, to_device(starts, device))


@dataclass(frozen=True)
class Tile:
    """Queries and keys that one call of a kernel for a CPU takes, of a packed row."""

    queries: slice
    keys: slice
    is_causal: bool = False
    distance: int | None = None  # from the first key to the first query in tokens, if a mask hides what a window does


@dataclass(frozen=True)
class Seen:
    """What the queries of a packed pass see of some keys."""

    runs: Runs  # that the queries are in
    window: int | None = None  # number of tokens that a query sees, itself included
    # If the keys are those of a part of a prefix that lies before each run, the number of tokens between the two. Else
    # they are those of the runs, and each attends causally to itself
    distance: int | None = None

    @property
    def reach(self) -> int:
        """How many of the last keys before a run its first query sees, and how many queries see the last key."""
        assert self.window is not None and self.distance is not None
        return max(0, self.window - 1 - self.distance)

    def tiles(self, num_keys: int) -> Iterator[Tile]:
        end = 0
        for length in self.runs.lengths:
            start, end = end, end + length
            if self.distance is not None:
                keys = slice(num_keys - min(num_keys, self.reach), num_keys)
                yield Tile(slice(start, start + min(length, self.reach)), keys, distance=num_keys - keys.start)
                continue
            size = length if self.window is None else max(self.window, _MIN_TILE)
            for first in range(0, length, size):
                last = min(first + size, length)
                if self.window is None or last <= self.window:
                    yield Tile(slice(start + first, start + last), slice(start, start + last), is_causal=True)
                    continue
                begin = max(0, first - self.window + 1)
                queries, keys = slice(start + first, start + last), slice(start + begin, start + last)
                yield Tile(queries, keys, distance=first - begin)

    def mask(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to the scores of a tile, `(Q, K)`."""
        if tile.distance is None:
            return None
        queries, keys = (torch.arange(x.stop - x.start, device="cpu") for x in (tile.queries, tile.keys))
        back = queries[:, None] + tile.distance + (self.distance or 0) - keys
        return torch.zeros_like(back, dtype=dtype).masked_fill((back < 0) | (back >= self.window), -torch.inf)


def _fold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`(B, H, Q, ...)` as `(B, H / G, G * Q, ...)`: the query heads of a key head become more queries of it."""
    return x.unflatten(1, (-1, num_groups)).flatten(2, 3)


def _unfold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    x = x.unflatten(2, (num_groups, -1)).movedim(3, 1)  # (B, Q, H / G, G, ...)
    return x.flatten(2, 3).transpose(1, 2)


def _batch(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """A view of `(1, H, Q, ...)`, `(G, H / G, Q, ...)`: more rows, where each query may see other keys."""
    return x[0].unflatten(0, (-1, num_groups)).transpose(0, 1)


# The kernels below take a query of shape (B, H, Q, D) and keys of fewer heads. All queries see all keys, unless
# `seen`, for a single row, says otherwise. The log-sum-exp has shape (B, H, Q), and is -inf where a query sees none.


def forward_on_cpu(query, key, value, seen: Seen | None, scale: float | None):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    num_groups = query.shape[1] // key.shape[1]
    if seen is None and num_groups == 1:  # as in decoding, where views take time, too
        return kernel(query, key, value, scale=scale)
    if seen is None:
        output, lse = kernel(_fold(query, num_groups), key, value, scale=scale)
        return _unfold(output, num_groups), _unfold(lse, num_groups)
    output = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
    for tile in seen.tiles(key.shape[2]):
        tile_output, tile_lse = kernel(
            _batch(query[:, :, tile.queries], num_groups),
            *(x[:, :, tile.keys].expand(num_groups, -1, -1, -1) for x in (key, value)),
            is_causal=tile.is_causal,
            attn_mask=seen.mask(tile, query.dtype),
            scale=scale,
        )
        _batch(output[:, :, tile.queries], num_groups).copy_(tile_output)
        _batch(lse[:, :, tile.queries], num_groups).copy_(tile_lse)
    return output, lse


def backward_on_cpu(grad, query, key, value, output, lse, seen: Seen | None, scale: float | None):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    num_groups = query.shape[1] // key.shape[1]
    if seen is None:
        grad, query, output, lse = (_fold(x, num_groups) for x in (grad, query, output, lse))
        grad_query, *grads = kernel(grad, query, key, value, output, lse, 0.0, False, scale=scale)
        return _unfold(grad_query, num_groups), *grads
    of_query = torch.zeros_like(query)
    of_key, of_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))  # several tiles add to them
    for tile in seen.tiles(key.shape[2]):
        tile_grad, tile_query, tile_output, tile_lse = (
            _batch(x[:, :, tile.queries], num_groups) for x in (grad, query, output, lse)
        )
        tile_key, tile_value = (x[:, :, tile.keys].expand(num_groups, -1, -1, -1) for x in (key, value))
        mask, tensors = seen.mask(tile, query.dtype), (tile_grad, tile_query, tile_key, tile_value)
        grads = kernel(*tensors, tile_output, tile_lse, 0.0, tile.is_causal, attn_mask=mask, scale=scale)
        _batch(of_query[:, :, tile.queries], num_groups).copy_(grads[0])
        for total, part in zip((of_key, of_value), grads[1:], strict=True):
            total[:, :, tile.keys] += part.sum(0, keepdim=True)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


class _CallOnCuda:
    """
    Tensors of FlashAttention-2, which have their heads behind their tokens, and which of them attend to each other.

    What a window hides of a prefix, it hides between rows of one length: the first queries of each run, as many as see
    anything, are rows, which all have the last keys of the prefix. The kernel puts their ends side by side.
    """

    def __init__(self, seen: Seen | None, num_queries: int, num_keys: int):
        self.seen, self.num_queries, self.num_keys = seen, num_queries, num_keys
        self.in_rows = seen is not None and seen.distance is not None
        # Bounds of the runs, most queries and keys of one, dropout, whether they attend causally
        self.arguments: tuple = (None, None, num_queries, num_keys, 0.0, False)
        self.windows: dict[str, int] = {}
        if seen is None:
            return
        starts, lengths = seen.runs.starts, seen.runs.lengths
        if self.in_rows:
            num_first, self.num_last = min(seen.reach, max(lengths)), min(seen.reach, num_keys)
            self.arguments = (None, None, num_first, self.num_last, 0.0, False)
            self.windows = {"window_size_left": seen.reach - num_first, "window_size_right": -1}
            # Place in the packed row of each query of the rows, behind the last one where a run is shorter
            places = starts[:-1, None] + torch.arange(num_first, device=starts.device)
            self.places = places.where(places < starts[1:, None], num_queries)
        else:
            # A bound, never 1: of single queries, the kernel mixes up log-sum-exps of grouped heads of different runs
            longest = max(2, *lengths)
            self.arguments = (starts, starts, longest, longest, 0.0, True)
            if seen.window is not None:
                self.windows = {"window_size_left": seen.window - 1, "window_size_right": 0}

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, H, Q, ...)` as the kernel takes it, tokens first."""
        if self.in_rows:
            return x[0].transpose(0, 1)[self.places.clamp(max=self.num_queries - 1)]
        x = x.transpose(1, 2)
        return x if self.seen is None else x[0]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_rows:
            return x[:, :, x.shape[2] - self.num_last :].transpose(1, 2).expand(len(self.places), -1, -1, -1)
        return self.of_queries(x)

    def to_queries(self, x: torch.Tensor, missing: float = 0.0) -> torch.Tensor:
        """What the kernel gives for the queries, tokens first, as `(B, H, Q, ...)`."""
        if self.in_rows:
            tokens = x.new_full((self.num_queries + 1, *x.shape[2:]), missing)
            tokens[self.places] = x
            x = tokens[: self.num_queries]
        return (x if self.seen is None else x[None]).transpose(1, 2)

    def to_keys(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_rows:
            return self.to_queries(x)
        x = x.sum(0, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype).transpose(1, 2)
        return nn.functional.pad(x, (0, 0, self.num_keys - self.num_last, 0))


def forward_on_cuda(query, key, value, seen: Seen | None, scale: float | None):
    call = _CallOnCuda(seen, query.shape[2], key.shape[2])
    tensors = call.of_queries(query), call.of_keys(key), call.of_keys(value)
    kernel = torch.ops.aten._flash_attention_forward
    output, lse, *_ = kernel(*tensors, *call.arguments, False, scale=scale, **call.windows)
    if call.in_rows:
        return call.to_queries(output), call.to_queries(lse.transpose(1, 2), missing=-torch.inf).contiguous()
    return call.to_queries(output), lse if seen is None else lse[None]


def backward_on_cuda(grad, query, key, value, output, lse, seen: Seen | None, scale: float | None):
    call = _CallOnCuda(seen, query.shape[2], key.shape[2])
    tensors = [call.of_queries(grad), call.of_queries(query), call.of_keys(key), call.of_keys(value)]
    tensors.append(call.of_queries(output))
    if call.in_rows:
        tensors[0] = tensors[0].masked_fill((call.places == call.num_queries)[..., None, None], 0)
        tensors.append(call.of_queries(lse).transpose(1, 2).contiguous())
    else:
        tensors.append(lse if seen is None else lse[0])
    rng_state = torch.empty(0, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
    kernel = torch.ops.aten._flash_attention_backward
    grads = kernel(*tensors, *call.arguments, rng_state, rng_state, scale=scale, **call.windows)
    return call.to_queries(grads[0]), call.to_keys(grads[1]), call.to_keys(grads[2])


def forward(query, key, value, seen: Seen | None, scale: float | None):
    kernels = forward_on_cuda if query.device.type == "cuda" else forward_on_cpu
    return kernels(query, key, value, seen, scale)


def backward(grad, query, key, value, output, lse, seen: Seen | None, scale: float | None):
    kernels = backward_on_cuda if query.device.type == "cuda" else backward_on_cpu
    return kernels(grad, query, key, value, output, lse, seen, scale)
