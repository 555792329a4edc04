"""Bytes of the prompts' keys and values that are alive while shared prompts generate, after each decoding step.

Prints for each step "alive", all keys and values that are reachable, "cache", what the cache holds: the prompt and
room for what is generated, and "expected", the same counted. Then the tokens that the cache of a sliding layer holds
of a prompt and of what a row generates, after each decoding step."""

import gc
import json
from unittest import mock

import tiny
import torch
from shared_exactness import SHAPE
from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig

from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

PROMPT, HEAD, WINDOW = 50, 8, 20


def keys_and_values():
    """Bytes of the storages of all tensors that can hold a prompt's keys or values."""
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() >= 3 and x.shape[-1] == HEAD]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.shape[-2] >= PROMPT - 1
    }
    return sum(storages.values())


def generate(model, steps, look):
    """`look` at the cache after each decoding step."""

    def hook(module, args, kwargs, output):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))  # its name in transformers 5.24
        if cache is not None:  # a decoding step, not a prompt
            look(cache)

    enable_prefix_sharing(model.eval())
    model.register_forward_hook(hook, with_kwargs=True)
    torch.manual_seed(0)
    prompts = torch.randint(50, 97, (2, PROMPT)).repeat_interleave(3, dim=0)
    config = GenerationConfig(
        max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0, disable_compile=True
    )
    with torch.no_grad():
        generate_with_shared_prefix(model, prompts, torch.ones_like(prompts), config)


def count_bytes(cache):
    gc.collect()
    states = [x for layer in cache.layers for pair in (*layer.prefixes, layer.own) for x in pair]
    tokens = 2 * (PROMPT - 1) + 6 * prefix_cache.MIN_NEW_STEPS
    bytes_of_a_token = 2 * 2 * HEAD * 4 * len(cache.layers)  # keys and values, key heads, float32
    steps.append(
        {
            "alive": keys_and_values(),
            "cache": sum(x.untyped_storage().nbytes() for x in states),
            "expected": tokens * bytes_of_a_token,
        }
    )


def count_tokens(cache):
    (layer,) = cache.layers
    stored = (x.untyped_storage().nbytes() // (4 * HEAD * 2) for x in (layer.prefixes[0][0], layer.own[0]))
    kept.append([tokens // rows for tokens, rows in zip(stored, (2, 6), strict=True)])


steps, kept = [], []
generate(tiny.build_model(), 5, count_bytes)
sliding = {**SHAPE, "num_hidden_layers": 1, "sliding_window": WINDOW}
with mock.patch.object(prefix_cache, "MIN_NEW_STEPS", 4):
    generate(AutoModelForCausalLM.from_config(MistralConfig(**sliding)), 3 * WINDOW, count_tokens)
print(json.dumps({"steps": steps, "window": WINDOW, "kept": kept}))
