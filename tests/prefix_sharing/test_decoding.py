"""What a decoded token of shared prompts costs: operations, and bytes that are read, copied and kept."""

import functools
import gc

import pytest
import torch
from transformers import GenerationConfig

from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.states import cache_argument

from .test_attention import Operators

PROMPT, ROWS = 20, 3  # tokens of the longest prompt, rows of each
LAYERS, HEAD_SIZE, KEY_HEADS = 2, 8, 2
BYTES_OF_A_TOKEN = 2 * KEY_HEADS * HEAD_SIZE * 4  # of a layer: keys and values in float32


def qwen3(layers=LAYERS):
    return build(family("qwen3", num_hidden_layers=layers, layer_types=["full_attention"] * layers)).eval()


def decode(generate, lengths, columns, steps):
    """Behind prompts of these lengths, with `ROWS` rows each."""
    torch.manual_seed(0)
    ids = torch.randint(50, 96, (len(lengths), columns)).repeat_interleave(ROWS, dim=0)
    mask = torch.stack([(torch.arange(columns) >= columns - length).long() for length in lengths])
    config = GenerationConfig(
        max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0, disable_compile=True
    )
    with torch.no_grad():
        generate(input_ids=ids, attention_mask=mask.repeat_interleave(ROWS, dim=0), generation_config=config)


def last_step(layers, lengths, steps, shared):
    """Operators of the last of some decoded tokens, without the LM head."""
    model = qwen3(layers)
    generate = model.generate
    if shared:
        enable_prefix_sharing(model)
        generate = functools.partial(generate_with_shared_prefix, model)
    seen, backbone = [], model.base_model.forward

    def forward(*args, **kwargs):
        with Operators() as operators:
            output = backbone(*args, **kwargs)
        seen[:] = [operators]
        return output

    model.base_model.forward = forward
    decode(generate, lengths, PROMPT, steps)
    return seen[0]


class TestDecoding:
    @pytest.mark.parametrize("lengths", [(PROMPT,), (PROMPT,) * 4, (20, 17, 12, 5)], ids=str)
    def test_a_decoded_token_reads_each_key_once_copies_none_and_takes_few_operations(self, lengths):
        """Views are not counted. Prompts of one length are read in one call. Four of different lengths take three
        calls more, and two operations that put their outputs together."""
        steps, operations, read, concatenated = 40, [], [], []
        for shared in (False, True):
            # Operations that one more layer takes for a token
            two, three = (last_step(layers, lengths, 6, shared).num_without_views for layers in (2, 3))
            operations.append(three - two)
            token = last_step(LAYERS, lengths, steps, shared)
            read.append(sum(x.nbytes for _, args, _ in token.named("scaled_dot_product") for x in args[1:3]))
            concatenated.append(sum(x.nbytes for name, args, _ in token.calls if name == "cat" for x in args[0]))
        assert operations[1] <= 1.25 * operations[0]
        own = len(lengths) * ROWS * steps  # the last prompt token is a row's own, the last generated one is never read
        whole, once = len(lengths) * ROWS * (PROMPT - 1), sum(length - 1 for length in lengths)
        assert read == [LAYERS * BYTES_OF_A_TOKEN * (tokens + own) for tokens in (whole, once)]
        assert concatenated[1] <= 0.1 * concatenated[0]

    def test_keys_and_values_of_prompts_are_alive_once(self):
        """All keys and values that are reachable, what the cache holds (the prompts, and room for what is generated),
        and the same counted."""
        columns, steps, model = 50, [], qwen3()

        def alive():
            gc.collect()
            tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() >= 3]
            tensors = [x for x in tensors if x.shape[-1] == HEAD_SIZE and x.shape[-2] >= columns - 1]
            return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}

        before = alive()

        def count_bytes(cache):
            states = [x for layer in cache.layers for pair in (*layer.prefixes, layer.own) for x in pair]
            tokens = 2 * (columns - 1) + 2 * ROWS * prefix_cache.MIN_NEW_STEPS
            steps.append(
                [
                    sum(size for place, size in alive().items() if place not in before),
                    sum(x.untyped_storage().nbytes() for x in states),
                    tokens * BYTES_OF_A_TOKEN * len(cache.layers),
                ]
            )

        self.watch(model, (columns,) * 2, columns, 5, count_bytes)
        assert len(steps) == 5 and all(len(set(sizes)) == 1 for sizes in steps), steps

    def test_a_layer_that_slides_keeps_a_window_and_room_for_some_tokens(self, monkeypatch):
        monkeypatch.setattr(prefix_cache, "MIN_NEW_STEPS", 4)
        window, kept = 20, []
        model = build(family("mistral", num_hidden_layers=1, sliding_window=window)).eval()

        def count_tokens(cache):
            (layer,) = cache.layers
            for states, rows in ((layer.prefixes[0][0], 2), (layer.own[0], 2 * ROWS)):
                kept.append(states.untyped_storage().nbytes() * 2 // BYTES_OF_A_TOKEN // rows)

        self.watch(model, (50,) * 2, 50, 3 * window, count_tokens)
        of_prompts, own = kept[::2], kept[1::2]
        assert len(own) == 3 * window
        assert max(of_prompts) == window and of_prompts[-1] == 0
        assert max(own) < window + 4

    def watch(self, model, lengths, columns, steps, look):
        """`look` at the cache after each decoding step of shared prompts."""

        def hook(module, args, kwargs, output):
            cache = kwargs.get(cache_argument(model))
            if cache is not None:  # a decoding step, not a prompt
                look(cache)

        enable_prefix_sharing(model)
        model.register_forward_hook(hook, with_kwargs=True)
        decode(functools.partial(generate_with_shared_prefix, model), lengths, columns, steps)
