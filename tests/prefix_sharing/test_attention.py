from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import flash_kernels
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from experiments.checks.family_check import COMPLETION, PROMPT, batch
from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing import kernels, routing
from rloo_memory.prefix_sharing.attention import shared_prefix_attention
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.kernels import Runs, Seen
from rloo_memory.prefix_sharing.nodes import Node, Path
from rloo_memory.prefix_sharing.routing import ReadPrefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

from .conftest import llama

# Heads, key heads, head size, head size of values, prefix tokens, tokens of each completion
SHAPES = {
    "ragged": (4, 2, 8, 8, 7, [3, 1, 5]),
    "single tokens": (4, 2, 16, 16, 40, [1, 1, 1]),
    "one token": (4, 1, 8, 8, 1, [1]),
    "no prefix": (4, 4, 8, 8, 0, [3, 4]),
    "small values": (4, 2, 24, 16, 9, [4, 2]),
    "longer than the blocks of a kernel": (2, 1, 64, 64, 600, [700, 33]),
}


def make_tensors(shape, dtype):
    num_heads, num_key_heads, size, value_size, num_prefix_tokens, lengths = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    shapes = [
        (num_heads, num_tokens, size),
        (num_key_heads, num_tokens, size),
        (num_key_heads, num_tokens, value_size),
    ]
    shapes += [(num_key_heads, num_prefix_tokens, size), (num_key_heads, num_prefix_tokens, value_size)]
    # As models make them: the heads of a token next to each other
    tensors = (torch.randn(n, h, d, generator=generator, dtype=torch.float64).transpose(0, 1) for h, n, d in shapes)
    return [x[None].to(dtype).requires_grad_() for x in tensors]


def whole_sequences(query, key, value, prefix_key, prefix_value, lengths, scale, sink=None, window=None):
    # Each completion behind a prefix of its own, with its own heads, in all the numbers that the mask leaves
    outputs, start, prefix_length = [], 0, prefix_key.shape[2]
    for length in lengths:
        tokens = slice(start, start + length)
        start += length
        keys = torch.cat([prefix_key, key[:, :, tokens]], dim=2).repeat_interleave(query.shape[1] // key.shape[1], 1)
        values = torch.cat([prefix_value, value[:, :, tokens]], dim=2)
        values = values.repeat_interleave(query.shape[1] // key.shape[1], 1)
        mask = torch.ones(length, prefix_length + length, dtype=torch.bool, device=key.device).tril(prefix_length)
        if window is not None:
            mask = mask.triu(prefix_length - window + 1)
        scores = (query[:, :, tokens] @ keys.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[None, :, None, None].expand(1, -1, length, 1)], dim=-1)
        outputs.append(scores.softmax(-1)[..., : keys.shape[2]] @ values)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def outputs_and_gradients(attention, tensors, *more):
    output = attention(*tensors, *more)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return output, *torch.autograd.grad(output, tensors, weights.to(output))


def errors(got, expected):
    return [((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in zip(got, expected, strict=True)]


class Operators(TorchDispatchMode):
    """Names of the operators that run, what they are called with, and tensors that they make, views left out."""

    def __init__(self):
        super().__init__()
        self.calls, self.results, self.num_without_views = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args, kwargs or {}))
        self.num_without_views += not func.is_view
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            self.results.append(result)
        return result

    def named(self, word):
        return [call for call in self.calls if word in call[0]]


def attend(query, key, value, prefix_key, prefix_value, runs, scale, num_parts=1, **more):
    prefix = zip(prefix_key.tensor_split(num_parts, 2), prefix_value.tensor_split(num_parts, 2), strict=True)
    return shared_prefix_attention(query, key, value, list(prefix), runs, scale, **more)


def check_call(query, key, value, starts_q, starts_k, max_q, max_k):
    """What FlashAttention-2 refuses otherwise, or takes for something else."""
    assert query.dim() == key.dim() == (4 if starts_q is None else 3)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    for starts, most, tokens in ((starts_q, max_q, query), (starts_k, max_k, key)):
        if starts is None:
            assert tokens.shape[1] == most > 0
        else:
            assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[-1] == len(tokens)
            assert starts.diff().max() <= most and starts.diff().min() > 0


def window_of(sizes):
    return tuple(sizes.get(f"window_size_{side}", -1) for side in ("left", "right"))


def flash_forward(query, key, value, *call, scale=None, **sizes):
    bounds_q, bounds_k, max_q, max_k, dropout, causal, debug = call
    check_call(query, key, value, *call[:4])
    assert dropout == 0 and not debug
    about = {"scale": scale, "causal": causal, "window": window_of(sizes)}
    out, lse = flash_kernels.flash_forward(query, key, value, *call[:4], **about)
    groups = query.shape[-2] // key.shape[-2]
    if max_q == 1 and groups > 1 and bounds_q is not None:  # in the order in which the kernel has it (PyTorch 2.13)
        lse = lse.unflatten(0, (-1, groups)).transpose(1, 2).reshape(lse.shape)
    return out.contiguous(), lse.contiguous(), *[query.new_empty(0)] * 3


def flash_backward(grad, query, key, value, out, lse, *call, scale=None, **sizes):
    check_call(query, key, value, *call[:4])
    assert lse.is_contiguous() and call[4] == 0
    about = {"scale": scale, "causal": call[5], "window": window_of(sizes)}
    return flash_kernels.flash_backward(grad, query, key, value, out, lse, *call[:4], **about)


@pytest.fixture(params=["cpu", "cuda"])
def calls(request, monkeypatch):
    """Runs a test with the kernels of a CPU, and with those of CUDA in PyTorch, whose calls are counted."""
    counts = Counter()
    if request.param == "cuda":
        for kind, function in (("forward", flash_forward), ("backward", flash_backward)):

            def counted(*args, kind=kind, function=function, **kwargs):
                counts[kind] += 1
                return function(*args, **kwargs)

            monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{kind}", counted)
            monkeypatch.setattr(kernels, f"{kind}_on_cpu", getattr(kernels, f"{kind}_on_cuda"))
    yield counts
    assert bool(counts) == (request.param == "cuda"), "the test would be one of the kernels of a CPU"


class TestSharedPrefixAttention:
    # Windows longer than everything, than a completion, than a prefix of 7 or 9 tokens, and than none of them
    @pytest.mark.parametrize("has_sink, window", [(False, None), *((True, w) for w in (None, 1000, 64, 8, 3, 1))])
    @pytest.mark.parametrize("num_parts", [1, 3])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_that_of_whole_sequences(self, shape, num_parts, has_sink, window, calls):
        tensors, lengths = make_tensors(shape, torch.float64), SHAPES[shape][-1]
        if has_sink:
            tensors.append(torch.linspace(-1, 2, tensors[0].shape[1], dtype=torch.float64, requires_grad=True))

        def attention(function, *tensors, of):
            return function(*tensors[:5], of, 0.3, sink=tensors[5] if has_sink else None, window=window)

        shared = partial(attention, partial(attend, num_parts=num_parts), of=Runs.of(lengths, "cpu"))
        got = outputs_and_gradients(shared, tensors)
        expected = outputs_and_gradients(partial(attention, whole_sequences, of=lengths), tensors)
        assert max(errors(got, expected)) < 1e-13
        if calls and window is None:  # for what is behind a prefix, and for each part that is not empty
            assert set(calls.values()) == {1 + min(num_parts, tensors[3].shape[2])}

    # Rounding of numbers with 24 and 8 bits, of two outputs and their mean. Whole sequences round probabilities, too
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rounding(self, shape, dtype, tolerance):
        tensors, lengths = make_tensors(shape, dtype), SHAPES[shape][-1]
        got = outputs_and_gradients(attend, tensors, Runs.of(lengths, "cpu"), 0.3)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        expected = outputs_and_gradients(whole_sequences, exact, lengths, 0.3)
        assert {x.dtype for x in got} == {dtype}
        assert max(errors(got, expected)) < tolerance

    def test_autocast(self):
        # Where keys are normalized, they are in float32 and the values are not
        query, key, value, *prefix = make_tensors("ragged", torch.float32)
        tensors = [query, key, value.bfloat16(), prefix[0], prefix[1].bfloat16()]
        with torch.autocast("cpu", torch.bfloat16):
            output = attend(*tensors, Runs.of([3, 1, 5], "cpu"), 0.3)
        expected = whole_sequences(query, key, value, *prefix, [3, 1, 5], 0.3)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)

    def test_second_derivatives_are_refused(self):
        tensors = make_tensors("ragged", torch.float64)
        output = attend(*tensors, Runs.of([3, 1, 5], "cpu"), 0.3)
        (grad,) = torch.autograd.grad(output.square().sum(), tensors[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    @pytest.mark.parametrize("is_causal, num_rows", [(True, 1), (False, 1), (False, 3)])
    def test_kernel_with_the_log_sum_exp(self, is_causal, num_rows, calls):
        query, key, value = (torch.randn(num_rows, h, 5, 8, dtype=torch.float64) for h in (4, 2, 2))
        output, lse = kernels.forward(query, key, value, Seen(Runs.of([5], "cpu")) if is_causal else None, None)
        expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
        if is_causal:
            scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, scores.logsumexp(-1))


@contextmanager
def layers_without_a_mask():
    """Indices of the layers in which completions attend to a prompt without a mask while it is open."""
    attending, layers = [], set()
    attend, attend_without = ReadPrefix.attend, routing.shared_prefix_attention

    def enter(self, own, module, *args, **kwargs):
        attending.append(module.layer_idx)
        return attend(self, own, module, *args, **kwargs)

    def without(*args):
        layers.add(attending[-1])
        return attend_without(*args)

    with patch.object(ReadPrefix, "attend", enter), patch.object(routing, "shared_prefix_attention", without):
        yield layers


class TestMasks:
    def context(self, num_prefix_tokens, lengths, window=None):
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        columns = torch.cat([torch.arange(length) for length in lengths])
        prefix = Path.of(Node(torch.arange(3, 3 + num_prefix_tokens)))  # behind padding
        return ReadPrefix(prefix, columns + 3 + num_prefix_tokens, rows, columns, lengths, window)

    @pytest.mark.parametrize("window", [None, 1, 4, 30])
    @pytest.mark.parametrize("num_prefix_tokens", [0, 1, 9])
    def test_mask(self, num_prefix_tokens, window):
        mask_function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        context = self.context(num_prefix_tokens, [3, 1, 6, 1, 1], window)
        allowed, start = context.allowed(mask_function, has_window=window is not None)[0, 0], 0
        num_hidden = num_prefix_tokens - context.prefix_size(window is not None)
        assert num_hidden == max(0, num_prefix_tokens - (window or 30) + 1)
        for size in context.blocks:
            for token in range(start, start + size):
                position = context.positions[token]
                seen = [mask_function(0, 0, position, x) for x in context.prefix.path_positions]
                assert not any(seen[:num_hidden])
                for other in range(start, start + size):
                    of_same_row = context.rows[token] == context.rows[other]
                    seen.append(of_same_row & mask_function(0, 0, position, context.positions[other]))
                seen = [bool(x) for x in seen[num_hidden:]]
                assert allowed[token, : len(seen)].tolist() == seen
            start += size

    def test_a_mask_is_the_largest_thing_that_it_is_made_of(self):
        context = self.context(300, [20] * 8)
        with Operators() as operators:
            allowed = context.allowed(sliding_window_causal_mask_function(30))
        sizes = [x.nbytes for x in operators.results]
        assert sorted(sizes)[-1] == allowed.nbytes and sorted(sizes)[-2] < allowed.nbytes / 2

    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    def test_plain_causal_layers_attend_without_a_mask(self, gradient_checkpointing):
        model = llama()
        enable_prefix_sharing(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with Operators() as operators, layers_without_a_mask() as layers:
            outputs = SharedPrefixPasses(PROMPT, 2).forward(model.model, **batch())
            outputs.last_hidden_state.sum().backward()
        assert layers == set(range(model.config.num_hidden_layers))
        attention = operators.named("scaled_dot_product")
        assert {name for name, _, _ in attention} == {
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        }
        assert all(kwargs.get("attn_mask") is None for _, _, kwargs in attention)

    @pytest.mark.parametrize("in_passes", [False, True])
    def test_gradients_of_the_prompt_are_added_in_float32_where_they_are_added(self, in_passes):
        model = llama().bfloat16()
        enable_prefix_sharing(model)
        input_ids = batch()["input_ids"]
        passes = SharedPrefixPasses(PROMPT, 2 * (COMPLETION + 1) if in_passes else None)
        outputs = passes.forward(model.model, input_ids, torch.ones_like(input_ids))
        with Operators() as operators:
            outputs.last_hidden_state.sum().backward()
        config = model.config
        shape = (1, config.num_key_value_heads, PROMPT - 1, config.head_dim)
        added = [x for x in operators.results if x.shape == shape and x.dtype == torch.float32]
        num_passes = 2 if in_passes else 0
        # A key and a value of each layer and prompt, copied by each pass, and added
        assert len(added) == 2 * config.num_hidden_layers * 2 * max(0, 2 * num_passes - 1)

    @pytest.mark.parametrize("window", [6, PROMPT, PROMPT + COMPLETION])
    def test_layers_with_a_window_copy_no_prefix(self, window):
        model = build(family("gemma3_text", sliding_window=window))
        enable_prefix_sharing(model)
        with layers_without_a_mask() as layers:
            SharedPrefixPasses(PROMPT).forward(model.model, **batch())
        assert layers == set(range(model.config.num_hidden_layers))

    def test_what_a_window_costs_does_not_grow_with_prefix_and_completion(self):
        scores = []
        for num_prefix_tokens, length in ((100, 200), (1000, 200), (100, 400)):
            query, key, value = (torch.randn(1, 2, length, 8) for _ in range(3))
            prefix = [torch.randn(1, 2, num_prefix_tokens, 8) for _ in range(2)]
            with Operators() as operators:
                shared_prefix_attention(query, key, value, [prefix], Runs.of([length], "cpu"), None, window=20)
            calls = [args for _, args, _ in operators.named("flash")]
            scores.append(sum(args[0].shape[2] * args[1].shape[2] for args in calls))
        assert scores[0] == scores[1] < scores[2] < 2.2 * scores[0]
