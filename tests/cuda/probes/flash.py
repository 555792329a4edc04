"""The calls of flash attention at every head size, forward, backward and in decoding: the checks on the host,
shapes and dtypes. Prints JSON: the number of cases, and what failed of which."""

import json
from itertools import product

import torch

from rloo_memory.prefix_sharing.attention import kernels_take, shared_prefix_attention
from rloo_memory.prefix_sharing.kernels import Runs, forward

HEADS = ((8, 8), (8, 2), (6, 1))  # of queries, of keys and values
LENGTHS = (  # of a prompt, of its completions, of a window, tokens
    (300, (33, 80), None), (129, (1, 1, 1), None), (129, (1,), None), (0, (7, 5), None), (1, (1,), None),
    (1000, (5,) * 40, None), (300, (33, 80), 64), (20, (1, 80), 33),
)  # fmt: skip


def empty(batch, heads, tokens, size, dtype):
    """(B, H, T, D), as a model has them: heads behind tokens in memory."""
    return torch.empty(batch, tokens, heads, size, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()


def check(size, heads, key_heads, dtype, prompt, lengths, window) -> None:
    tokens = sum(lengths)
    query, key, value = (empty(1, n, tokens, size, dtype) for n in (heads, key_heads, key_heads))
    of_prompt = [empty(1, key_heads, prompt, size, dtype) for _ in range(2)]
    assert kernels_take(key, value)
    runs = Runs.of(list(lengths), query.device)
    out = shared_prefix_attention(query, key, value, [of_prompt], runs, None, window=window)
    assert out.shape == (1, tokens, heads, size)
    given = (query, key, value, *of_prompt)
    for grad, x in zip(torch.autograd.grad(out, given, torch.empty_like(out)), given, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
    decoded = (torch.empty(8, n, t, size, device="cuda", dtype=dtype) for n, t in ((heads, 1), (key_heads, 50)))
    query, key = decoded
    out, lse = forward(query, key, torch.empty_like(key), None, None)
    assert out.shape == (8, heads, 1, size) and lse.shape == (8, heads, 1)


cases = list(product(range(8, 264, 8), HEADS, (torch.bfloat16, torch.float16), LENGTHS))
failed = {}
for size, heads, dtype, lengths in cases:
    try:
        check(size, *heads, dtype, *lengths)
    except Exception as error:
        failed[f"{size}, {heads}, {dtype}, {lengths}"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps({"capability": torch.cuda.get_device_capability(), "cases": len(cases), "failed": failed}))
