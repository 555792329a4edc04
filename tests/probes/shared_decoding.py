"""Errors of the logits of decoding steps, shared and whole, for every architecture; called as shared_exactness is.

The tokens are forced, so that all decode the same. The truth is the same weights in float64, of five steps. Where the
model is in float64 throughout, it decodes thirty with its rows in another order: more than the prompts are long, and
past the windows.
"""

import functools
import json
import sys
from unittest import mock

import torch
from shared_exactness import batch, build, error, measure_all, pure_float64
from transformers import GenerationConfig

from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing.cache import attention_with_lse
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

ORDER = (0, 3, 1, 4, 5, 2)  # of rows, in which the prompts are mixed


def logits(model, shared=False, steps=5, order=slice(None)) -> torch.Tensor:
    """Of shape (steps, rows, vocabulary), float64."""
    ids, mask, prompt = batch()
    ids, mask = ids[order,], mask[order,]

    def forced(row, tokens):  # what is written behind the prompt differs between rows
        return [3 + (5 * row + len(tokens)) % 50]

    config = GenerationConfig(
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=1,
        disable_compile=True,
    )
    model.eval()
    outputs = []  # of every call of the LM head, as the model gives them: `generate` rounds to float32
    head = model.get_output_embeddings().register_forward_hook(lambda module, args, x: outputs.append(x[:, -1:]))
    generate = functools.partial(type(model).generate, model, prefix_allowed_tokens_fn=forced)
    if shared:
        model.generate, generate = generate, functools.partial(generate_with_shared_prefix, model)
    with torch.no_grad():
        generate(input_ids=ids[:, :prompt], attention_mask=mask[:, :prompt], generation_config=config)
    head.remove()
    return torch.stack([x[:, 0] for x in outputs[-steps:]]).double()


def errors_of(name, dtype, autocast=None):
    if dtype == torch.float64:
        return exact_errors_of(name)
    model = build(name, dtype)
    with pure_float64():
        exact = build(name, dtype).double()
        truth = logits(exact)
    precision = torch.autocast("cpu", autocast, enabled=autocast is not None)
    with precision:
        stock = error(logits(model), truth)
    enable_prefix_sharing(model)
    with precision:
        shared = error(logits(model, shared=True), truth)
    return {"stock": stock, "shared": shared}


def exact_errors_of(name):
    """And "merged": how often attention went through the kernel whose outputs are merged."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return attention_with_lse(*args, **kwargs)

    model = build(name, torch.float64)
    truth = logits(model, steps=30, order=ORDER)
    enable_prefix_sharing(model)
    more_often = mock.patch.object(prefix_cache, "MIN_NEW_STEPS", 4)  # the cache makes room, and drops
    with mock.patch.object(prefix_cache, "attention_with_lse", counted), more_often:
        shared = logits(model, shared=True, steps=30, order=ORDER)
    return {"shared": error(shared, truth), "merged": len(calls)}


if __name__ == "__main__":
    print(json.dumps(measure_all(errors_of, *sys.argv[1:])))
