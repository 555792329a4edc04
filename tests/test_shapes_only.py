"""Tensors without values: the shapes, views and bytes of real ones, and no memory."""

import gc
import resource

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.shapes_only import ShapesOnly

pytestmark = pytest.mark.torch


def train_twice(shapes=None):
    """Two steps of a small network under autocast and checkpointing; what was alive after each of its parts."""
    creating = shapes.new if shapes else torch.enable_grad
    levels, memory = [], LiveBytes()

    def level(tensor):
        levels.append((memory.total, memory.peak, tuple(tensor.shape), tensor.stride(), tensor.dtype))
        memory.reset()
        return tensor

    def block(x):
        queries, keys = projection(x).unflatten(-1, (2, 4, 8)).transpose(1, 3).unbind(2)
        weights = level(torch.softmax(queries @ keys.transpose(-1, -2) / 3, dim=-1))
        return x + level((weights @ keys).transpose(1, 2).flatten(2) @ output).to(x.dtype)

    with memory:
        with creating():
            ids = torch.zeros(3, 20, dtype=torch.long)
            embedding, projection = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 64)
            output = torch.nn.Parameter(torch.empty(32, 32))
        parameters = [*embedding.parameters(), *projection.parameters(), output]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = level(checkpoint(block, embedding(ids), use_reentrant=False))
                parts = [part.logsumexp(-1) for part in level(hidden)[:, 1:].split(7, dim=1)]
                level(torch.cat(parts, dim=1)).sum().backward()
            level(projection.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            level(output)
    return levels


def test_a_training_has_the_shapes_dtypes_and_bytes_of_a_real_one():
    # The first step of a real training makes what a later one finds; each kind of run starts the same
    real = train_twice()
    with ShapesOnly() as shapes:
        without_values = train_twice(shapes)
    assert without_values == real
    assert max(peak for _, peak, *_ in real) > 50_000, "nothing was counted"


def test_tensors_larger_than_the_machine_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ShapesOnly() as shapes, LiveBytes() as memory:
        with shapes.new():
            weight = torch.nn.Parameter(torch.randn(2**20, 2**19))
        product = (weight @ weight.mT).relu_()
        product.mean().backward()
        assert memory.total >= 3 * 2**41 and weight.grad.shape == weight.shape
        del product, weight
        gc.collect()
        assert memory.total < 2**20, "freed tensors are still counted"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_views_share_a_storage_and_operations_in_place_give_their_tensor():
    with ShapesOnly() as shapes:
        with shapes.new():
            x = torch.zeros(4, 6)
        for view in (x[1:, ::2], x.T, x.reshape(2, 12), x.expand(3, 4, 6), x.split(2)[1], torch.atleast_3d(x)):
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert (x * 2).untyped_storage()._cdata != x.untyped_storage()._cdata
        assert x.add_(1) is x and torch.mul(x, x, out=x) is x
        assert torch.empty(0, 3).new_zeros(2).tolist() == [0, 0]  # outside `new`, with values
