"""The planner's model of TRL's fused LM head, held against TRL's own, byte for byte."""

import contextlib
import itertools
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rloo_memory.plan.simulation import heads
from rloo_memory.plan.simulation.heads import WORDS, FusedHead
from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.shapes_only import ShapesOnly
from rloo_memory.plan.simulation.work import Work

# In place of a Triton kernel: `kernel[grid](...)` works in the buffers that it is given
NO_KERNEL = defaultdict(lambda: lambda *args, **kwargs: None)


@contextlib.contextmanager
def as_on_cuda():
    from trl.kernels import chunked_logprob

    instead = {
        "_use_triton": lambda device: True, "triton": SimpleNamespace(cdiv=lambda a, b: 1),
        "_forward_kernel": NO_KERNEL, "_backward_kernel": NO_KERNEL, "_addmm_fp32": lambda *args: None,
    }  # fmt: skip
    with mock.patch.multiple(chunked_logprob, create=True, **instead):
        with mock.patch.object(heads, "add_product", lambda *args: None):
            yield


def peaks(head, tokens: int, weights: str, trained: bool, bias: bool, autocast: bool) -> list[int]:
    """Bytes of a forward and of its backward at their peaks, and of what is kept between them."""
    memory, dtype = LiveBytes(), getattr(torch, weights)
    shapes = ShapesOnly(memory, Work())
    with shapes, shapes.new():
        hidden = torch.empty(tokens, 64, dtype=dtype).requires_grad_()
        weight = torch.empty(40_000, 64, dtype=dtype).requires_grad_(trained)
        added = torch.empty(40_000, dtype=dtype).requires_grad_(trained) if bias else None
        before = memory.total
        memory.reset()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            log_probs = head(hidden, weight, added, torch.empty(tokens, dtype=torch.long))
        forward, kept = memory.peak - before, memory.total - before
        memory.reset()
        log_probs.sum().backward()
        return [forward, kept, memory.peak - before]


@pytest.mark.parametrize("tokens", [300, 9000], ids=["less than a tile", "three tiles"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_fused_head_allocates_what_trls_does(device, tokens):
    """On a CPU but for what is a few bytes a token, which is beside the float32 copies of a tile."""
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    import trl.trainer.utils  # noqa: F401  its backward does, which makes tensors

    outputs = None, 1.0, ("log_probs", "entropy")
    ours = lambda *given: FusedHead.apply(*given, WORDS, device == "cpu")  # noqa: E731
    theirs = lambda *given: kernels.ChunkedLogProbFunction.apply(*given, 1.0, WORDS, *outputs)[0]  # noqa: E731
    found = set()
    with as_on_cuda() if device == "cuda" else contextlib.nullcontext():
        for case in itertools.product(("float32", "bfloat16"), *[(False, True)] * 3):
            planned, real = (peaks(head, tokens, *case) for head in (ours, theirs))
            assert planned == (real if device == "cuda" else pytest.approx(real, rel=1e-4)), case
            found.add(tuple(real))
    assert len(found) > 4, "the cases do not differ: an empty test"
