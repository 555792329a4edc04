"""Error of the key and value projections' gradients after 64 completions of one prompt, one a pass, in bfloat16: as
mixed precision (float32 weights, bfloat16 arithmetic, TRL's default) against stock, and with bfloat16 weights, where
each pass rounds what it adds to a weight's gradient, against stock that accumulates one completion at a time. The same
for 64 micro-batches of one completion. Truth is float64, errors are means over three seeds."""

import functools
import json
from collections import Counter

import torch
from shared_exactness import VOCAB, build, error, passes_of, pure_float64

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.tree import Prompts, Tree

PROMPT, COMPLETION, ROWS = 24, 4, 64


def gradient(seed, model, rows=ROWS, mixed=False, spread=False, **shared):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + COMPLETION))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    model.zero_grad()
    tree = Tree.of(Prompts.of(ids[:, :PROMPT], torch.ones_like(ids[:, :PROMPT])), rows_per_backward=rows)
    for step, chunk in enumerate(ids.split(rows)):
        if spread:
            shared["passes"] = passes_of(PROMPT, tree=tree, first_row=step * rows)
        labels = chunk.clone()
        labels[:, :PROMPT] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model(
                input_ids=chunk, attention_mask=torch.ones_like(chunk), labels=labels, fused_lm_head=True, **shared
            )
        out.log_probs.sum().backward()  # every completion pulls the same way, so that the sum grows
        tree.leave((step + 1) * rows)
    projections = [x for layer in model.model.layers for x in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return torch.cat([module.weight.grad.flatten().double() for module in projections])


def errors_of(seed):
    run, make = functools.partial(gradient, seed), functools.partial(build, "llama", seed=seed)
    exact, rounded = make(torch.float64), make(torch.bfloat16).double()
    with pure_float64():
        truth, rounded_truth = run(exact), run(rounded)
    one_a_pass = dict(passes=passes_of(PROMPT, tokens_per_forward=1))
    model = make(torch.float32)
    errors = {"mixed stock": error(run(model, mixed=True), truth)}
    enable_prefix_sharing(model)
    errors["mixed shared"] = error(run(model, mixed=True, **one_a_pass), truth)
    errors["mixed micro-batches"] = error(run(model, rows=1, mixed=True, spread=True), truth)
    model = make(torch.bfloat16)
    errors["accumulate"] = error(run(model, rows=1), rounded_truth)
    enable_prefix_sharing(model)
    errors["shared"] = error(run(model, **one_a_pass), rounded_truth)
    errors["micro-batches"] = error(run(model, rows=1, spread=True), rounded_truth)
    return errors


if __name__ == "__main__":
    result = Counter()
    for seed in range(3):
        for name, value in errors_of(seed).items():
            result[name] += value / 3
    print(json.dumps(result))
