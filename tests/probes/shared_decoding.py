"""Errors of the logits of five decoding steps, shared and whole, for every architecture: with weights in the first
dtype and, if there is a second, arithmetic in that one (autocast). The tokens are forced, so that all decode the same.
The truth is the same weights in float64."""

import functools
import json
import sys

import torch
from shared_exactness import ARCHITECTURES, batch, build, error, pure_float64  # builds the fork, puts it on the path
from transformers import GenerationConfig
from trl.generation.shared_prefix import generate_with_shared_prefix
from trl.models.prefix_sharing import enable_prefix_sharing

STEPS = 5


def logits(model, shared=False) -> torch.Tensor:
    """Of shape (steps, rows, vocabulary), float64."""
    ids, mask, prompt = batch()

    def forced(row, tokens):  # what is written behind the prompt differs between rows
        return [3 + (5 * row + len(tokens)) % 50]

    config = GenerationConfig(
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=1,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    model.eval()
    generate = functools.partial(type(model).generate, model, prefix_allowed_tokens_fn=forced)
    if shared:
        model.generate, generate = generate, functools.partial(generate_with_shared_prefix, model)
    with torch.no_grad():
        output = generate(input_ids=ids[:, :prompt], attention_mask=mask[:, :prompt], generation_config=config)
    return torch.stack(output.logits).double()


def errors_of(name, dtype, autocast=None):
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


if __name__ == "__main__":
    results = {}
    for precision in sys.argv[1:]:  # a dtype, or two: that of the weights + that of autocast
        dtypes = [getattr(torch, name) for name in precision.split("+")]
        results[precision] = {name: errors_of(name, *dtypes) for name in ARCHITECTURES}
    print(json.dumps(results))
