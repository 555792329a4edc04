"""Prefix sharing on every kind of model, beside whole rows: scores, gradients, decoding, and whole trainings."""

import statistics
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from kinds import ATTENTION, STATES, kind
from rounding import is_no_larger
from transformers import GenerationConfig

from experiments.checks.family_check import SHARED, check, error, errors_beside_float64, in_float64, prepared, run
from experiments.checks.tiny_families import FIRST_TOKEN, LAST_TOKEN, build, family
from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.tree import Prompts, Tree

# Attention is merged except where the model's own has soft-capping, where keys and values have other sizes, and where
# prompts are not shared (longrope)
UNMERGED = {"gemma2", "deepseek_v3", "phi3 longrope", "kimi_linear"}
# One of each kind of attention, and one or two of a kind of mixer, without experts: rounding sees arithmetic, not
# classes. Where it sends a token to another expert, one such token is more than all else
ROUNDED = {
    "attention": (
        "llama", "qwen3", "qwen2", "gemma2", "gpt_neox", "mixtral", "gpt_oss", "deepseek_v3", "gemma4_text",
        "qwen3_vl",
    ),
    "states": ("qwen3_5_text", "olmo_hybrid", "bamba", "falcon_h1", "lfm2", "lfm3"),
}  # fmt: skip
EXPERTS = ("mixtral", "gpt_oss")
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "mixed bfloat16": (torch.float32, torch.bfloat16),
    "mixed float16": (torch.float32, torch.float16),
}


@pytest.mark.parametrize("name", [*ATTENTION, *STATES])
def test_every_kind_of_model_scores_and_decodes_what_whole_rows_do(name, monkeypatch):
    """Rows that decode go past the windows, and their cache makes room and drops every four tokens."""
    merged = mock.Mock(side_effect=prefix_cache.attention_with_lse)
    monkeypatch.setattr(prefix_cache, "attention_with_lse", merged)
    monkeypatch.setattr(prefix_cache, "MIN_NEW_STEPS", 4)
    result = check(kind(name))
    assert (result.verdict, result.generation) == (SHARED, "same"), result
    assert merged.called == (name not in UNMERGED)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_errors_are_no_larger_than_those_of_whole_rows(kind, precision):
    """Beside float64. Those of one batch are a small sample, and steps, where a token goes to another expert, a
    smaller one. In mixed precision with float16 a training scales its loss, so there gradients say nothing."""
    ratios = {}
    for name in ROUNDED[kind][: 3 if precision == "mixed float16" else None]:
        seeds = range(7, 16 if name in EXPERTS else 11)
        found = errors_beside_float64(family(name), *PRECISIONS[precision], seeds=seeds)
        medians = {
            way: [statistics.median(errors) for errors in zip(*of_batches, strict=True)]
            for way, of_batches in found["errors"].items()
        }
        whole = medians.pop("whole rows")
        if name not in EXPERTS:  # of a single batch
            ratios.setdefault("decoded", {})[name] = found["decoded"]["shared"] / found["decoded"]["whole rows"]
        for way, errors in medians.items() if precision != "mixed float16" else ():
            for of, mine, theirs in zip(("tokens", "gradient"), errors, whole, strict=True):
                ratios.setdefault(f"{way}: {of}", {})[name] = mine / theirs
    assert {what: found for what, found in ratios.items() if not is_no_larger(found, EXPERTS)} == {}


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
            "micro-batches": SharedPrefixPasses(prompt, tree=tree, first_row=step * rows),
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


@st.composite
def batches(draw, longest):
    """(inputs, prompt columns), passes, checkpointing: any number of prompts of `longest` tokens at most, completions
    of any length (none included), rows in any order."""
    prompts = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    rows = [(p, draw(st.integers(0, 9))) for p in range(len(prompts)) for _ in range(draw(st.integers(1, 4)))]
    rows = draw(st.permutations(rows))
    columns, width = max(prompts), max(1, *[length for _, length in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    texts = [torch.randint(FIRST_TOKEN, LAST_TOKEN, (length,), generator=generator) for length in prompts]
    ids = torch.zeros(len(rows), columns + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(rows):
        ids[row, columns - prompts[prompt] : columns] = texts[prompt]
        ids[row, columns : columns + length] = torch.randint(FIRST_TOKEN, LAST_TOKEN, (length,), generator=generator)
        mask[row, columns - prompts[prompt] : columns + length] = 1
    passes = draw(
        st.one_of(
            st.builds(SharedPrefixPasses, st.just(columns), completions_per_forward=st.sampled_from([None, 1, 2, 3])),
            st.builds(SharedPrefixPasses, st.just(columns), st.integers(1, 12)),
            st.builds(TokenBudgetPasses, st.just(columns), st.integers(1, 40)),
        )
    )
    return ({"input_ids": ids, "attention_mask": mask}, columns), passes, draw(st.booleans())


# With a window of 1, the cache of transformers itself keeps all
WINDOWS = [family("mistral", sliding_window=window) for window in (None, 2, 5, 14)]
DECODED = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=1, disable_compile=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "families, number, longest",
    [(WINDOWS, 60, 9), *(([family(name)], 10, 20) for name in ("qwen3_5_text", "bamba", "lfm2"))],
    ids=["windows", "qwen3_5_text", "bamba", "lfm2"],
)
def test_random_batches_score_and_decode_as_whole_rows(families, number, longest):
    """In float64. Hypothesis shrinks what fails."""
    pairs, tried = [], []
    for each in families:
        with in_float64():
            pairs.append([prepared(build(each), torch.float64) for _ in range(2)])
            enable_prefix_sharing(pairs[-1][1])

    @seed(1)
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(pairs), batches(longest))
    def compare(pair, case):
        (whole, shared), (batch, passes, checkpointing) = pair, case
        inputs, columns = batch
        whole.train(), shared.train()
        shared.gradient_checkpointing_enable() if checkpointing else shared.gradient_checkpointing_disable()
        (tokens, gradient), (got, got_gradient) = run(whole, *batch), run(shared, *batch, passes=passes)
        torch.testing.assert_close(got, tokens, rtol=1e-10, atol=1e-10)
        assert (got_gradient - gradient).norm() <= 1e-10 * gradient.norm() + 1e-12
        prompts = {name: x[:, :columns] for name, x in inputs.items()} | {"generation_config": DECODED}
        with torch.no_grad():
            expected = whole.eval().generate(**prompts)
            assert torch.equal(generate_with_shared_prefix(shared.eval(), **prompts), expected)
        tried.append(1)

    with in_float64():
        compare()
    assert len(tried) >= number


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rloo", "grpo"])
def test_training_runs_are_the_same_in_every_setting(probe, trainer):
    """Two updates or three with sampled completions, in float64: the same tokens, logs and parameters to rounding."""
    result = probe("shared_trainer", trainer)
    assert len(result) >= 15
    for name, training in result.items():
        assert "error" not in training, (name, training)
        assert training["logs"] <= 1e-9 and training["parameters"] <= 1e-9, (name, training)
        if " alike, " in name:  # of several prompts, what they begin with went through the model by itself
            assert (training["starts"] > 0) != name.endswith("one prompt an update"), (name, training)
        most, least = ("whole", "shared") if " short, " in name or " whole rows" in name else ("shared", "whole")
        assert training[most] > 2 * training[least], (name, training)
        assert (max(training["grad_norms"]) > 1e-3) != name.endswith("all truncated"), (name, training["grad_norms"])
