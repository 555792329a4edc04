"""What cannot run on tensors without values, and what stands in its place: kernels, and checks that read numbers.

The attention kernel is replaced by one that saves what FlashAttention saves, bitsandbytes' linear layers by one that
holds what theirs hold. The names that are patched here belong to torch, some of them private there, and to this
project.
"""

import contextlib
import functools
from unittest import mock

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rloo_memory.plan.simulation import heads
from rloo_memory.plan.simulation.autocast import HALF, as_on_cuda
from rloo_memory.prefix_sharing import cache, enabling, kernels, routing
from rloo_memory.prefix_sharing.attention import flash_attention_takes
from rloo_memory.prefix_sharing.images import MultimodalInputs


class Attention(torch.autograd.Function):
    """Output and saved tensors of a memory-efficient attention kernel: query, key, value, output and the float32
    log-sum-exp of each query (FlashAttention-2, arXiv 2307.08691, algorithm 1). A boolean mask is converted to the
    query's dtype first (ATen, `convert_boolean_attn_mask`)."""

    @staticmethod
    def forward(ctx, query, key, value, mask, is_causal, work):
        if mask is not None and mask.dtype == torch.bool:
            mask = query.new_empty(mask.shape)
        work.attention(query, key, value, mask, is_causal)
        ctx.is_causal, ctx.work = is_causal, work
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, mask = ctx.saved_tensors[:4]
        ctx.work.attention(query, key, value, mask, ctx.is_causal, backward=True)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None


class SafeSoftmax(torch.autograd.Function):
    """`_safe_softmax` in the steps of CUDA's that allocate: it looks for rows that are masked whole."""

    @staticmethod
    def forward(ctx, scores, dim, dtype):
        both = scores.softmax(dim, dtype), scores.isneginf()  # at the same time
        ctx.save_for_backward(both[0])
        ctx.dim, ctx.dtype = dim, scores.dtype
        return both[0]

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved_tensors
        product = grad * probs  # with which CUDA's kernel begins
        return torch._softmax_backward_data(product, probs, ctx.dim, ctx.dtype), None, None


def attention(
    math, on_cuda, work, query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, **kwargs
):
    """In place of `torch.nn.functional.scaled_dot_product_attention`. On CUDA, only FlashAttention takes fewer
    heads of keys than of queries, in half precision. A CPU's kernel takes values of the keys' size alone (not those of
    multi-head latent attention). What is left is `math`, which holds all scores."""
    if torch.is_autocast_enabled("cpu"):  # attention is on autocast's list
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    has_fewer = enable_gqa and query.shape[1] != key.shape[1] and query.dtype not in HALF
    if has_fewer if on_cuda else key.shape[-1] != value.shape[-1]:
        return math(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return Attention.apply(query, key, value, attn_mask, is_causal, work)


def dropout(input, p=0.5, training=True, inplace=False):
    """In place of `torch.nn.functional.dropout`: a mask of one byte an element is kept, as on CUDA."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


class QuantizedLinear(torch.autograd.Function):
    """A linear layer whose weight is brought to the input's dtype for each product, as bitsandbytes does.

    With 8 bits it holds its input past autograd's saved tensors (`MatMul8bitLt`: `ctx.tensors`), so checkpointing does
    not let go of it before the backward."""

    @staticmethod
    def forward(ctx, x, bias, shape, holds_input):
        ctx.shape, ctx.held = shape, x if holds_input else None
        with torch.autocast("cpu", enabled=False):  # it gives what it gets
            return torch.nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad.new_empty(ctx.shape), None, None, None


@contextlib.contextmanager
def pretending(device: str, shapes, head_backward):
    """Attention and its masks, and on a "cuda" device dropout, without computing. `shapes` makes the tensors; the
    backward of the fused LM head runs within `head_backward`, which decorates it."""
    # The values of masks do not matter, and take time and, of 20,000 tokens, gigabytes
    without_values = shapes.new()

    def allowed(context, mask_function, has_window=False):
        columns = context.prefix_size(has_window) + max(context.blocks)
        return torch.ones(1, 1, len(context.rows), columns, dtype=torch.bool)

    math = without_values(torch.ops.aten._scaled_dot_product_attention_math)
    attend = functools.partial(attention, math, device == "cuda", shapes.work)

    with contextlib.ExitStack() as stack:
        patch = lambda *args, **kwargs: stack.enter_context(mock.patch.object(*args, **kwargs))  # noqa: E731
        patch(torch.nn.functional, "scaled_dot_product_attention", attend)
        masks = {name: without_values(ALL_MASK_ATTENTION_FUNCTIONS[name]) for name in ("sdpa", "eager")}
        stack.enter_context(mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, masks))
        patch(heads.FusedHead, "backward", staticmethod(without_values(head_backward(heads.FusedHead.backward))))
        patch(routing.ReadPrefix, "allowed", without_values(allowed))
        patch(routing, "_added", without_values(routing._added))
        # On CUDA the kernel knows of windows
        mask = without_values(kernels.Seen.mask) if device != "cuda" else lambda *args: None
        patch(kernels.Seen, "mask", mask)
        # They compare real numbers
        patch(enabling, "error_of_passes", lambda *args, **kwargs: 0.0)
        patch(enabling, "ignores_state", lambda mixer, prefix, hidden_size: False)
        patch(MultimodalInputs, "with_same_images", lambda self, rows: [rows])  # tokens alone tell prompts apart
        if device == "cuda":
            stack.enter_context(as_on_cuda())
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
            library.impl("_safe_softmax", lambda x, dim, dtype=None: SafeSoftmax.apply(x, dim, dtype), "AutogradCPU")
            for module in (routing, cache):
                patch(module, "kernels_take", flash_attention_takes)
            patch(torch.nn.functional, "dropout", dropout)
            patch(heads, "add_product", shapes.work.product)
        yield
