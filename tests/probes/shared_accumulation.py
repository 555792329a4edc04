"""Error of the key and value projections' gradients after 64 completions of one prompt, one a pass, in bfloat16: as
mixed precision (float32 weights, bfloat16 arithmetic, TRL's default) against stock, and with bfloat16 weights, where
each pass rounds what it adds to a weight's gradient, against stock that accumulates one completion at a time. Truth is
float64, errors are means over three seeds."""

import json

import torch  # noqa: E402, I001
from shared_exactness import ARCHITECTURES, VOCAB, build, error, passes_of, pure_float64  # puts the fork on the path
from trl.models.prefix_sharing import enable_prefix_sharing  # noqa: E402

ARCHITECTURES["plain"] = ("llama", {})
PROMPT, COMPLETION, ROWS = 24, 4, 64


def gradient(model, seed, rows=ROWS, mixed=False, **shared):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + COMPLETION))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    for chunk in ids.split(rows):
        labels = chunk.clone()
        labels[:, :PROMPT] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model(
                input_ids=chunk, attention_mask=torch.ones_like(chunk), labels=labels, fused_lm_head=True, **shared
            )
        out.log_probs.sum().backward()  # every completion pulls the same way, so that the sum grows
    grads = [
        getattr(layer.self_attn, name).weight.grad.flatten().double()
        for layer in model.model.layers
        for name in ("k_proj", "v_proj")
    ]
    model.zero_grad()
    return torch.cat(grads)


one_a_pass = dict(passes=passes_of(PROMPT, completions_per_forward=1))
result = dict.fromkeys(("mixed stock", "mixed shared", "accumulate", "shared"), 0.0)
for seed in range(3):
    with pure_float64():
        truth = gradient(build("plain", torch.float64, seed), seed)
        rounded_truth = gradient(build("plain", torch.bfloat16, seed).double(), seed)
    model = build("plain", torch.float32, seed)
    result["mixed stock"] += error(gradient(model, seed, mixed=True), truth) / 3
    enable_prefix_sharing(model)
    result["mixed shared"] += error(gradient(model, seed, mixed=True, **one_a_pass), truth) / 3
    model = build("plain", torch.bfloat16, seed)
    result["accumulate"] += error(gradient(model, seed, rows=1), rounded_truth) / 3
    enable_prefix_sharing(model)
    result["shared"] += error(gradient(model, seed, **one_a_pass), rounded_truth) / 3
print(json.dumps(result))
