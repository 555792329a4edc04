"""What the operations of a simulation compute and move, and how long that takes on a device of some speed.

An operation takes as long as its multiplications, or as what it reads and writes, whichever is longer (the roofline
model, Williams et al. 2009, doi 10.1145/1498765.1498785). What starting it takes is not in it.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import prod

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ATEN = torch.ops.aten
# They read what they look up, and not all that is there
LOOKUPS = {ATEN.embedding.default, ATEN.index.Tensor, ATEN.index_select.default, ATEN.gather.default}
ATTENTION = {
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: 0,  # place of the query among the arguments
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: 1,
}


def attention_flops(query: torch.Size, key: torch.Size, value_size: int, is_causal: bool) -> int:
    """Of the forward, for a query of shape (B, H, Q, D) and keys (B, H / G, K, D): half of the scores if causal."""
    batch, heads, queries, size = query
    flops = 2 * batch * heads * queries * key[2] * (size + value_size)
    return flops // 2 if is_causal else flops


@dataclass(frozen=True)
class Speed:
    """Of a device, in what it reaches, not in what it is sold with."""

    flops: float  # a second
    bytes: float  # a second


@dataclass
class Work:
    """How often an operation of so many floating-point operations and bytes ran, by phase. `times` says how many times
    what runs now stands for."""

    phase: str | None = None
    times: float = 1
    counted: dict[str, Counter[tuple[int, int]]] = field(default_factory=dict)
    costs: dict[tuple, tuple[int, int]] = field(default_factory=dict)  # of operations on tensors of some shapes

    def add(self, flops: int, moved: int) -> None:
        if self.phase is not None and moved:
            self.counted.setdefault(self.phase, Counter())[flops, moved] += self.times

    def operation(self, key: tuple, func, args: tuple, tensors: list[torch.Tensor], result) -> None:
        """Count an operation, whose `key` is the same for the same shapes."""
        if self.phase is None:
            return
        if key not in self.costs:
            self.costs[key] = cost(func, args, tensors, result)
        self.add(*self.costs[key])

    def attention(self, query, key, value, mask, is_causal: bool, backward: bool = False) -> None:
        """Count a kernel that holds no scores; its backward computes them again (FlashAttention-2, section 3.1)."""
        flops = attention_flops(query.shape, key.shape, value.shape[-1], is_causal)
        moved = nbytes(query, key, value, query, *(() if mask is None else (mask,)))
        self.add(flops * 5 // 2 if backward else flops, 2 * moved if backward else moved)

    def product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count `total += a @ b`."""
        self.add(2 * prod(a.shape) * b.shape[-1], nbytes(total, total, a, b))


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def cost(func, args: tuple, tensors: list[torch.Tensor], result) -> tuple[int, int]:
    """Floating-point operations and bytes of an operation; none of one that only makes room, or names what is there
    (with PEFT's adapters on experts, each forward does so with all of their weights)."""
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    if "empty" in func.__name__ or func is ATEN.set_.source_Tensor:
        return 0, 0
    if func in LOOKUPS:
        return 0, 2 * nbytes(*results)
    moved = nbytes(*tensors, *results)
    if func in ATTENTION:
        query, key, value = args[ATTENTION[func] : ATTENTION[func] + 3]
        is_causal = any(x is True for x in args)
        flops = attention_flops(query.shape, key.shape, value.shape[-1], is_causal)
        return (flops * 5 // 2 if ATTENTION[func] else flops), moved
    if func is ATEN._grouped_mm.default:
        return 2 * prod(args[0].shape) * args[1].shape[-1], moved
    formula = flop_registry.get(getattr(ATEN, func.overloadpacket.__name__.rstrip("_"), None))  # in place or not
    return (formula(*args, out_val=result) if formula else 0), moved


def seconds(counted: Counter[tuple[int, int]], speed: Speed) -> float:
    return sum(times * max(flops / speed.flops, moved / speed.bytes) for (flops, moved), times in counted.items())


def along_line(few: dict, more: dict, x: float) -> dict:
    """Numbers by name at `x` of the straight lines from `few` at 0 to `more` at 1. What one does not have is 0."""
    return {name: few.get(name, 0) + (more.get(name, 0) - few.get(name, 0)) * x for name in few | more}
