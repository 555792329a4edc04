"""Per-token log-probabilities, entropies and gradients in passes against those of whole sequences in one.

Both run in one process on one model: without `passes` it computes what upstream does (test_prefix_sharing
shows it bit for bit). For each architecture it prints the relative errors in each of the settings below: prompts
shared or not, passes of some completions or tokens, checkpointing on or off. In bfloat16 the truth is the same rounded
weights in float64, and stock's own error stands beside.

    shared_exactness.py attention|states PRECISION ...

A precision is a dtype, or two: that of the weights + that of autocast.
"""

import contextlib
import copy
import functools
import json
import sys

import torch
from architectures import ARCHITECTURES, EAGER, EXPERTS, FIRST_SPECIAL, KINDS, SHAPE, STATES, VOCAB
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from experiments.checks.float64 import pure_float64
from experiments.fused_head import add_fused_lm_head
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

WHOLE = dict(prefix_sharing=False)
# (gradient checkpointing, settings); rows have 10 to 18 tokens, completions with the last prompt token 1 to 8
SETTINGS = (
    (False, dict(tokens_per_forward=1)),
    (False, dict(completions_per_forward=3)),
    (False, dict()),
    (False, dict(tokens_per_forward=9)),
    (False, dict(WHOLE, tokens_per_forward=36)),
    (True, dict(tokens_per_forward=16)),
)


def passes_of(prefix_length, prefix_sharing=True, **options):
    """What the trainers hand to the model for these options."""
    return (SharedPrefixPasses if prefix_sharing else TokenBudgetPasses)(prefix_length, **options)


def build_random(name, dtype, seed=0):
    model_type, extra = (ARCHITECTURES | STATES)[name]
    torch.manual_seed(seed)
    extra = copy.deepcopy(extra)  # configs complete the dictionaries that they are given
    config = CONFIG_MAPPING[model_type](**(extra if name.endswith("-nested") else {**SHAPE, **extra}))
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    make = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model = make.from_config(config, attn_implementation="eager" if name in EAGER else "sdpa")
    for parameter in model.parameters():  # larger than at initialisation, so that attention matters
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    if name in EXPERTS:
        model.set_experts_implementation("eager")  # the others do not know float64
    model.to(dtype).train()
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model


@functools.cache
def weights_of_states(name):
    """Those of a model that forgets slowly: at initialization, hardly anything of a prompt is left in the states. The
    token that goes through where there is no prefix, that of padding, leaves something, too.

    Some families draw them in an explicit float32, which is another dtype in `pure_float64`: ask once before.
    """
    values = build_random(name, torch.float32).state_dict()
    for parameter in values:
        if parameter.endswith("A_log"):
            values[parameter].fill_(-2)
        elif parameter.endswith("conv1d.weight"):
            values[parameter].mul_(8)
        elif "embed" in parameter and values[parameter].shape[0] == VOCAB:
            values[parameter][0] = values[parameter][1]
    return values


def build(name, dtype, seed=0):
    model = build_random(name, dtype, seed)
    if name in STATES:
        model.load_state_dict(weights_of_states(name))
    return model


def batch(seed=7):
    """Two prompts with three completions each: left padding, completions of 1 to 7 tokens, one without any token."""
    prompt, completion = 11, 7
    torch.manual_seed(seed)
    ids = torch.randint(3, FIRST_SPECIAL, (6, prompt + completion))
    ids[:3, :prompt], ids[3:, :prompt] = ids[0, :prompt], ids[3, :prompt]
    mask = torch.ones_like(ids)
    mask[3:, :4] = 0
    for row, length in enumerate((7, 3, 1, 5, 0, 2)):
        mask[row, prompt + length :] = 0
    return ids, mask, prompt


def run(model, name, seeds=(7,), **shared):
    """(log-probabilities and entropies, gradient of all parameters, loss) of each batch, in float64."""
    return tuple(map(torch.stack, zip(*(run_batch(model, name, seed, **shared) for seed in seeds), strict=True)))


def run_batch(model, name, seed, **shared):
    ids, mask, prompt = batch(seed)
    if name in EXPERTS:
        shared = dict(shared, output_router_logits=True)
    return run_inputs(model, dict(input_ids=ids, attention_mask=mask), prompt, **shared)


def run_inputs(model, inputs, prompt, **shared):
    ids = inputs["input_ids"]
    labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :prompt] = -100
    model.zero_grad()
    out = model(**inputs, labels=labels, fused_lm_head=True, **shared)
    columns = ids.shape[1] - prompt
    tokens = torch.stack([out.log_probs[:, -columns:], out.entropy[:, -columns:]])
    weights = torch.linspace(-1, 1, ids.shape[0] * columns, device=tokens.device).view(1, -1, columns)
    weights = weights * torch.tensor([1.0, 0.1], device=tokens.device).view(2, 1, 1)
    loss = (tokens * weights).sum() + (out.aux_loss if out.aux_loss is not None else 0)
    loss.backward()
    return tokens.detach().double(), gradient_of(model), loss.detach().double()


def gradient_of(module):
    gradients = [p.grad.flatten().double() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients or [torch.zeros(1)])


def error(got, truth):
    return ((got - truth).norm() / truth.norm()).item()


def error_of_batches(got, truth):
    """The median, which does not see that a token went to another expert in one of them."""
    return torch.tensor([error(x, y) for x, y in zip(got, truth, strict=True)]).quantile(0.5).item()


def errors_of(name, dtype, autocast=None):
    """With `autocast`, the model computes in that dtype in mixed precision and the truth is `dtype` throughout."""
    half = torch.bfloat16 in (dtype, autocast)
    # Rounding errors of one batch are a small sample, and steps, where a token goes to another expert, a smaller one
    seeds = range(7, 16 if name in EXPERTS else 11) if half else (7,)
    model = build(name, dtype)
    precision = torch.autocast("cpu", autocast, enabled=autocast is not None)
    with precision:
        stock = truth = run(model, name, seeds)
    if autocast is not None:
        truth = run(model, name, seeds)
    elif half:
        with pure_float64():
            truth = run(build(name, dtype).double(), name, seeds)
    enable_prefix_sharing(model)
    errors = {"tokens": [], "gradient": [], "loss": []}  # by setting
    for checkpointing, settings in SETTINGS[3::2] if half else SETTINGS:
        if checkpointing:
            model.gradient_checkpointing_enable()
        with precision:
            tokens, gradient, loss = run(model, name, seeds, passes=passes_of(batch()[2], **settings))
        for kind, got, expected in zip(errors, (tokens, gradient, loss), truth, strict=True):
            errors[kind].append(error_of_batches(got, expected))
    with precision:
        off = run(model, name, seeds[:1])  # enabled but not used: the attention that the model was loaded with
    errors["off_is_equal"] = all(torch.equal(x, y[:1]) for x, y in zip(off[:2], stock[:2], strict=True))
    stock_errors = [error_of_batches(got, expected) for got, expected in zip(stock, truth, strict=True)]
    return errors | dict(zip(("stock_tokens", "stock_gradient"), stock_errors[:2], strict=True))


def measure_all(measure, kind, *precisions):
    """What `measure` finds of each architecture of that kind, by precision."""
    every, rounded = KINDS[kind]
    for name in STATES if kind == "states" else ():
        weights_of_states(name)
    results = {}
    for precision in precisions:
        dtypes = [getattr(torch, name) for name in precision.split("+")]
        exact = dtypes == [torch.float64]
        with pure_float64() if exact else contextlib.nullcontext():
            results[precision] = {name: measure(name, *dtypes) for name in (every if exact else rounded)}
    return results


if __name__ == "__main__":
    print(json.dumps(measure_all(errors_of, *sys.argv[1:])))
