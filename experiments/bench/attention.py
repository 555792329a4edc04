"""Milliseconds of one layer's attention, as stock and as prefix sharing call it; bfloat16."""

from collections.abc import Callable
from contextlib import nullcontext

from experiments.bench.samples import Cell
from experiments.checks.device_facts import timed
from experiments.checks.exactness import attention_kernels, profile_of
from experiments.checks.kernels import Setting, cudnn_first, mask_of, whole
from experiments.measuring import Place

# Heads, heads of keys, and their size
HEADS = {
    "16/8-heads-of-128": (16, 8, 128),
    "32/8-heads-of-128": (32, 8, 128),
    "4/2-heads-of-16": (4, 2, 16),
}
CALLS = (
    "rows, equal lengths", "rows, padded", "shared, prompt", "shared, completions", "shared, completions with a mask",
)  # fmt: skip
CUDNN = ", cuDNN first"
WAYS = (*CALLS, *(call + CUDNN for call in CALLS if call != "shared, completions"))


class Layer:
    """Rows of a prompt and a completion without a mask (equal lengths) and with the mask of padded rows; the prompt
    alone; and packed completions that attend to it, by kernels and with a mask. The sum of the last two is what a
    shared layer takes. Each by the order of backends that all measurements have, and with cuDNN first."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        self.heads, self.key_heads, self.head_size = HEADS[cell.model]
        self.prompt, self.completion, self.k = cell.prompt_tokens, cell.completion_tokens, cell.k
        self.device, self.repeats = here.device, 20 if here.device == "cuda" else 2
        self.calls = self.made()

    def made(self) -> dict[str, tuple[Callable, tuple[int, ...]]]:
        """Of `CALLS`: what attends; rows, tokens of the query, and of keys before them."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from trl.models.prefix_sharing_attention import Runs, shared_prefix_attention

        length, packed = self.prompt + self.completion, self.k * self.completion
        groups = self.heads // self.key_heads
        padding = torch.arange(length, device=self.device) < length - torch.arange(self.k, device=self.device)[:, None]
        padded = torch.ones(length, length, dtype=torch.bool, device=self.device).tril() & padding[:, None, None]

        def masked(query, key, value):
            """As transformers does with a mask: keys are repeated."""
            return sdpa(query, *(x.repeat_interleave(groups, dim=1) for x in (key, value)), padded)

        plain = lambda *x: sdpa(*x, is_causal=True, enable_gqa=True)  # noqa: E731
        lengths = [self.completion] * self.k
        runs = Runs.of(lengths, torch.device(self.device))
        mask = mask_of(Setting(self.heads, self.key_heads, self.head_size, self.prompt, tuple(lengths)), self.device)
        rows, both = (self.k, length), (1, packed, self.prompt)
        attend = (
            (plain, rows),
            (masked, rows),
            (plain, (1, self.prompt)),
            (lambda *x: shared_prefix_attention(*x, runs, None), both),
            (lambda *x: whole(*x, mask, plain=False), both),
        )
        return dict(zip(CALLS, attend, strict=True))

    def random(self, rows: int, tokens: int, *key_tokens: int):
        """Query of `tokens`, key and value of as many, and keys and values of each of `key_tokens`."""
        import torch

        sizes = [(self.heads, tokens), *[(self.key_heads, n) for n in (tokens, *key_tokens) for _ in range(2)]]
        return [
            torch.randn(rows, heads, n, self.head_size, device=self.device, dtype=torch.bfloat16, requires_grad=True)
            for heads, n in sizes
        ]

    def sample(self, way: str) -> dict[str, float]:
        """Milliseconds of forward and of backward. The kernels of one of each are printed."""
        import torch

        with cudnn_first() if way.endswith(CUDNN) else nullcontext():
            attend, sizes = self.calls[way.removesuffix(CUDNN)]
            inputs = self.random(*sizes)
            output = attend(*inputs)
            weights = torch.randn_like(output)
            with profile_of(self.device) as profiler:
                torch.autograd.grad(attend(*inputs), inputs, weights)
            print(f"  {way}: {attention_kernels(profiler)}", flush=True)
            back = lambda: torch.autograd.grad(output, inputs, weights, retain_graph=True)  # noqa: E731
            forward = timed(lambda: attend(*inputs), self.device, self.repeats)
            backward = timed(back, self.device, self.repeats)
        return {"forward_ms": round(1000 * forward, 4), "backward_ms": round(1000 * backward, 4)}
