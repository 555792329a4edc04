"""Rounding errors of prefix sharing, beside those of whole rows and the truth in float64."""

import math
import statistics

import image_rows
import pytest
import torch

from experiments.checks.family_check import error, errors_beside_float64, in_float64, prepared
from experiments.checks.tiny_families import FIRST_TOKEN, LAST_TOKEN, build, family
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.tree import Prompts, Tree

# One of each kind of attention, and one or two of a kind of mixer: rounding sees arithmetic, not classes. A token goes
# to all experts of a layer: where rounding sends one to another expert, that is more than all else
ROUNDED = {
    "attention": ("llama", "gemma2", "gpt_neox", "gpt_oss", "deepseek_v3", "gemma4_text"),
    "states": ("qwen3_5_text", "bamba", "falcon_h1", "lfm2"),
}
FEW = {"attention": ("llama", "gemma2", "deepseek_v3"), "states": ("qwen3_5_text", "bamba", "lfm2")}
ALL_EXPERTS = {"gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2}}
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "mixed bfloat16": (torch.float32, torch.bfloat16),
    "mixed float16": (torch.float32, torch.float16),
}


def is_no_larger(ratios: dict[str, float]) -> bool:
    """Ratios of an error to stock's, by model. Some batches of a model are a small sample of rounding errors, and CPUs
    round differently: each may be half as large again, and the mean over the models 5 % larger, give or take two
    standard errors of that mean."""
    logs = [math.log(ratio) for ratio in ratios.values()]
    largest = 1.05 * math.exp(2 * statistics.stdev(logs) / math.sqrt(len(logs)))
    return math.exp(statistics.fmean(logs)) <= largest and max(logs) <= math.log(1.5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_errors_are_no_larger_than_those_of_whole_rows(kind, precision):
    """Beside float64. Those of one batch are a small sample. In mixed precision with float16 a training scales its
    loss, so there gradients say nothing, and tokens are decoded only."""
    ratios = {}
    for name in ROUNDED[kind] if precision == "bfloat16" else FEW[kind]:
        seeds = () if precision == "mixed float16" else range(7, 11)
        model = family(name, **ALL_EXPERTS.get(name, {}))
        found = errors_beside_float64(model, *PRECISIONS[precision], seeds=seeds)
        medians = {
            way: [statistics.median(errors) for errors in zip(*of_batches, strict=True)]
            for way, of_batches in found["errors"].items()
        }
        whole = medians.pop("whole rows", ())
        ratios.setdefault("decoded", {})[name] = found["decoded"]["shared"] / found["decoded"]["whole rows"]
        for way, errors in medians.items():
            for of, mine, theirs in zip(("tokens", "gradient"), errors, whole, strict=True):
                ratios.setdefault(f"{way}: {of}", {})[name] = mine / theirs
    assert {what: found for what, found in ratios.items() if not is_no_larger(found)} == {}


@pytest.mark.slow
def test_rounding_errors_with_images_are_no_larger_than_those_of_whole_rows():
    """Root mean squares over some batches, as the rounding errors of one are a small sample."""
    ratios = {"tokens": {}, "gradient": {}, "tower gradient": {}}
    for name in ("gemma3", "gemma4-blocks", "qwen2_5_vl", "qwen3_5", "internvl", "smolvlm"):
        errors = image_rows.errors_beside_float64(name, {"two a pass": {"completions_per_forward": 2}}, range(5))
        whole, shared = (torch.tensor(of_batches).square().mean(0).sqrt() for of_batches in errors.values())
        for found, ratio in zip(ratios.values(), (shared / whole).tolist(), strict=True):
            found[name] = ratio
    assert all(map(is_no_larger, ratios.values())), ratios


def gradient_of_the_prompt(model, data_seed, rows=64, autocast=False, passes=None):
    """Of the key and value projections, after 64 completions of one prompt, some rows a micro-batch. Every completion
    pulls the same way, so that the sum grows."""
    prompt, completion = 24, 4
    torch.manual_seed(data_seed)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (64, prompt + completion))
    ids[:, :prompt] = ids[0, :prompt]
    model.zero_grad()
    tree = Tree.of(Prompts.of(ids[:, :prompt], torch.ones_like(ids[:, :prompt])), rows_per_backward=rows)
    for step, chunk in enumerate(ids.split(rows)):
        shared = {
            "one a pass": SharedPrefixPasses(prompt, tokens_per_forward=1),
            "micro-batches": SharedPrefixPasses(prompt, tree=tree, rows=range(step * rows, (step + 1) * rows)),
        }.get(passes)
        labels = chunk.clone()
        labels[:, :prompt] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            inputs = {"input_ids": chunk, "attention_mask": torch.ones_like(chunk), "labels": labels}
            out = model(**inputs, fused_lm_head=True, passes=shared)
        out.log_probs.sum().backward()
        tree.leave((step + 1) * rows)
    projections = [x for layer in model.model.layers for x in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return torch.cat([module.weight.grad.flatten() for module in projections])


@pytest.mark.slow
def test_many_passes_in_bfloat16_keep_the_gradient_of_the_prompt():
    """64 passes each add to the gradient of the prompt's keys. With bfloat16 weights that is no worse than stock with
    64 accumulated steps. In mixed precision it may cost one more rounding: the sum over the completions is rounded
    once on its way into the projection, where stock rounds each completion's part and averages over them. Errors
    beside float64 are means over three batches."""
    models = {dtype: prepared(build(family("llama")), dtype) for dtype in (torch.float32, torch.bfloat16)}
    exact = {dtype: prepared(build(family("llama")), dtype).double() for dtype in models}
    cases = {
        "mixed stock": (torch.float32, {"autocast": True}),
        "accumulate": (torch.bfloat16, {"rows": 1}),
        "mixed shared": (torch.float32, {"autocast": True, "passes": "one a pass"}),
        "mixed micro-batches": (torch.float32, {"autocast": True, "rows": 1, "passes": "micro-batches"}),
        "shared": (torch.bfloat16, {"passes": "one a pass"}),
        "micro-batches": (torch.bfloat16, {"rows": 1, "passes": "micro-batches"}),
    }
    with in_float64():
        truths = {dtype: [gradient_of_the_prompt(model, i) for i in range(3)] for dtype, model in exact.items()}
    errors = {}
    for name, (dtype, options) in cases.items():
        if "passes" in options:
            enable_prefix_sharing(models[dtype])
        found = [gradient_of_the_prompt(models[dtype], i, **options) for i in range(3)]
        errors[name] = statistics.fmean(error(got, truth) for got, truth in zip(found, truths[dtype], strict=True))
    assert max(errors["shared"], errors["micro-batches"]) <= errors["accumulate"], errors
    assert max(errors["mixed shared"], errors["mixed micro-batches"]) <= 1.25 * errors["mixed stock"], errors
