"""Error of the key and value projections' gradients after 64 completions of one prompt, one a pass, in bfloat16: as
mixed precision (float32 weights, bfloat16 arithmetic, TRL's default) against stock, and with bfloat16 weights, where
each pass rounds what it adds to a weight's gradient, against stock that accumulates one completion at a time. The same
for 64 micro-batches of one completion. Truth is float64, errors are means over three seeds."""

import json
from collections import Counter

import torch  # noqa: E402, I001
from shared_exactness import ARCHITECTURES, VOCAB, build, error, passes_of, pure_float64  # puts the fork on the path
from trl.models.prefix_sharing_enabling import enable_prefix_sharing  # noqa: E402
from trl.models.prefix_sharing_micro_batches import OpenPrefix  # noqa: E402

ARCHITECTURES["plain"] = ("llama", {})
PROMPT, COMPLETION, ROWS = 24, 4, 64


def gradient(model, seed, rows=ROWS, mixed=False, open_prefix=None, **shared):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + COMPLETION))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    for step, chunk in enumerate(ids.split(rows)):
        if open_prefix is not None:
            open_prefix.enter(step, updates=step == ROWS - 1)
            shared["passes"] = passes_of(PROMPT, open_prefix=open_prefix)
        labels = chunk.clone()
        labels[:, :PROMPT] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model(
                input_ids=chunk, attention_mask=torch.ones_like(chunk), labels=labels, fused_lm_head=True, **shared
            )
        out.log_probs.sum().backward()  # every completion pulls the same way, so that the sum grows
        if open_prefix is not None:
            open_prefix.backward()
    grads = [
        getattr(layer.self_attn, name).weight.grad.flatten().double()
        for layer in model.model.layers
        for name in ("k_proj", "v_proj")
    ]
    model.zero_grad()
    return torch.cat(grads)


one_a_pass = dict(passes=passes_of(PROMPT, tokens_per_forward=1))
result = Counter()
for seed in range(3):
    with pure_float64():
        truth = gradient(build("plain", torch.float64, seed), seed)
        rounded_truth = gradient(build("plain", torch.bfloat16, seed).double(), seed)
    model = build("plain", torch.float32, seed)
    result["mixed stock"] += error(gradient(model, seed, mixed=True), truth) / 3
    enable_prefix_sharing(model)
    result["mixed shared"] += error(gradient(model, seed, mixed=True, **one_a_pass), truth) / 3
    micro_batches = gradient(model, seed, rows=1, mixed=True, open_prefix=OpenPrefix(ROWS))
    result["mixed micro-batches"] += error(micro_batches, truth) / 3
    model = build("plain", torch.bfloat16, seed)
    result["accumulate"] += error(gradient(model, seed, rows=1), rounded_truth) / 3
    enable_prefix_sharing(model)
    result["shared"] += error(gradient(model, seed, **one_a_pass), rounded_truth) / 3
    result["micro-batches"] += error(gradient(model, seed, rows=1, open_prefix=OpenPrefix(ROWS)), rounded_truth) / 3
print(json.dumps(result))
