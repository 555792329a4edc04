"""Per-token log-probabilities and gradients of shared prompts beside untouched rows, on this device.

    python -m experiments.checks.exactness [--device cuda]

The truth is the same weights in float64, row by row. Stock's own error stands beside that
of prefix sharing, in float32 and with bfloat16 weights under autocast, and the attention kernels that ran are named.
Exit code 4 if an error is larger than it may be: 1e-5 in float32, stock's too (norms, softmax and the head round
there), and in bfloat16 that of stock and a tenth, because sums are in another order. The rows stay in
results/<machine>/exactness.csv either way.
"""

import re
import sys

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from experiments.checks.family_check import error, gradient_of, in_float64, run, scored
from experiments.fused_head import add_fused_lm_head
from experiments.measuring import EXIT_VERDICT, FACTS, place
from experiments.record import write_csv
from experiments.run_options import Parser
from rloo_memory.errors import program
from rloo_memory.models import shape_config
from rloo_memory.plan.scale_up.extrapolate import with_layers
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

COLUMNS = (
    "precision", "way", "log_prob_error", "gradient_error", "attention", "shape", "prompt_tokens",
    "completion_tokens", "k", *FACTS,
)  # fmt: skip
# (shape, layers or None for all, vocabulary, prompt, completion, k). In float32, a CUDA device has no fused kernel for
# a plain causal prompt of grouped heads: its scores, heads x prompt x prompt, are in memory several times
WORKLOADS = {
    ("cpu", "float32"): ("qwen3-8-layers", 2, 2000, 64, 16, 4),
    ("cpu", "bfloat16"): ("qwen3-8-layers", 2, 2000, 64, 16, 4),
    ("cuda", "float32"): ("qwen3-0.6b", None, 151_936, 1000, 128, 8),
    ("cuda", "bfloat16"): ("qwen3-0.6b", None, 151_936, 3000, 256, 8),
}
BATCHES = 4  # rounding is random: one small batch can err a fifth more or less
# What torch calls for attention, by itself or within `scaled_dot_product_attention`, and a GPU's kernels behind it
OPERATION = re.compile(r"aten::(_scaled_dot_product_\w+|_\w+_attention_forward\w*)")
KERNEL = re.compile(r"\w*(?:flash_fwd|fmha|cudnn\w*sdpa|attention)\w*")
FLOAT32_BOUND, BFLOAT16_MARGIN = 1e-5, 1.1


def batch(seed: int, vocab_size: int, prompt: int, completion: int, k: int) -> dict:
    """One prompt with k completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocab_size, (k, prompt + completion), generator=generator)
    ids[:, :prompt] = ids[0, :prompt]
    lengths = torch.linspace(completion // 2, completion, k).long()
    return {"input_ids": ids, "attention_mask": (torch.arange(prompt + completion) < prompt + lengths[:, None]).long()}


def truth(model, inputs: dict, prompt: int):
    """What `family_check.run` gives, of a model in float64, row by row."""
    tokens = []
    for row in range(len(inputs["input_ids"])):
        own, loss = scored(model, inputs, prompt, slice(row, row + 1))
        loss.backward()
        tokens.append(own)
    gradient = gradient_of(model)
    model.zero_grad()
    return torch.cat(tokens, dim=1), gradient


def attention_of(device: str, model, inputs: dict, prompt: int, **settings) -> str:
    """Names of what attends in a forward: with a backward, reading the events would take longer than measuring."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with torch.no_grad(), profile(activities=activities) as profiler:
        scored(model, inputs, prompt, **settings)
    names = set()
    for event in profiler.events():
        if event.device_type.name == "CPU":
            names |= {found[1] for found in [OPERATION.fullmatch(event.name)] if found}
        else:
            names |= {f"[{found[0]}]" for found in [KERNEL.search(event.name)] if found}
    return " ".join(sorted(names)) or "none"


def models_of(device: str, precision: str) -> tuple:
    """The model that shares prompts, and one with its weights in float64."""
    shape, layers, vocab_size, *_ = WORKLOADS[device, precision]
    hf_config = shape_config(shape, vocab_size)
    hf_config = with_layers(hf_config, layers or hf_config.num_hidden_layers)
    torch.manual_seed(0)
    models = []
    for dtype in (getattr(torch, precision), torch.float64):
        with torch.device(device):
            models.append(AutoModelForCausalLM.from_config(hf_config, dtype=dtype).train())
        models[-1].gradient_checkpointing_enable()
        add_fused_lm_head(models[-1], outputs=("log_probs", "entropy"))
    model, exact = models
    exact.load_state_dict(model.state_dict())
    enable_prefix_sharing(model)
    return model, exact


def compare(device: str, precision: str):
    """Yields one row a way. Errors are norms relative to the truth's, root mean squares over the batches."""
    _, _, vocab_size, prompt, completion, k = WORKLOADS[device, precision]
    model, exact = models_of(device, precision)
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")
    together = SharedPrefixPasses(prefix_length=prompt)
    two = SharedPrefixPasses(prefix_length=prompt, tokens_per_forward=2 * (completion + 1))
    ways = {"stock": {}, "shared": {"passes": together}, "shared, two a pass": {"passes": two}}
    squares, attention = {way: [0.0, 0.0] for way in ways}, {}
    for seed in range(BATCHES):
        inputs = batch(seed, vocab_size, prompt, completion, k)
        with in_float64():
            true = truth(exact, inputs, prompt)
        for way, settings in ways.items():
            with autocast:
                if seed == 0:
                    attention[way] = attention_of(device, model, inputs, prompt, **settings)
                got = run(model, inputs, prompt, **settings)
            # Of the tokens, log-probabilities alone: the first of two
            for i, (ours, theirs) in enumerate(((got[0][0], true[0][0]), (got[1], true[1]))):
                squares[way][i] += error(ours, theirs) ** 2
    for way, sums in squares.items():
        log_probs, grads = (f"{(total / BATCHES) ** 0.5:.3e}" for total in sums)
        yield {"way": way, "log_prob_error": log_probs, "gradient_error": grads, "attention": attention[way]}


def too_large(rows: list[dict[str, str]]) -> list[str]:
    """The errors above their bounds, each in words with its bound. What is not a number is above any."""
    stock = {row["precision"]: row for row in rows if row["way"] == "stock"}
    said = []
    for row in rows:
        for name in ("log_prob_error", "gradient_error"):
            in_float32 = row["precision"] == "float32"
            bound = FLOAT32_BOUND if in_float32 else BFLOAT16_MARGIN * float(stock[row["precision"]][name])
            if not float(row[name]) <= bound:
                said.append(f"{name} of {row['way']} in {row['precision']} is {row[name]}, bound {bound:.3e}")
    return said


@program("exactness")
def main(argv: list[str] | None) -> int:
    here = place(Parser("checks.exactness", __doc__).parse_args(argv))
    rows = []
    for precision in ("bfloat16", "float32"):
        shape, layers, _, prompt, completion, k = WORKLOADS[here.device, precision]
        about = {"precision": precision, "prompt_tokens": prompt, "completion_tokens": completion, "k": k}
        about |= {"shape": f"{shape}, {layers} layers" if layers else shape, **here.facts}
        for row in compare(here.device, precision):
            rows.append(about | row)
            told = f"log-probs {row['log_prob_error']}  gradient {row['gradient_error']}  {row['attention']}"
            print(f"{precision:9} {row['way']:19} {told}", flush=True)
        write_csv(here.folder / "exactness.csv", COLUMNS, rows)
    if failed := too_large(rows):
        print(f"exactness: larger than it may be: {'; '.join(failed)}", file=sys.stderr)
    return EXIT_VERDICT if failed else 0


if __name__ == "__main__":
    sys.exit(main())
