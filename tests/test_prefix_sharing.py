"""Prefix sharing on every kind of model, beside whole rows: scores, gradients, decoding, and whole trainings."""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from kinds import ATTENTION, STATES, kind
from transformers import GenerationConfig

from experiments.checks.family_check import SHARED, check, in_float64, prepared, run
from experiments.checks.tiny_families import FIRST_TOKEN, LAST_TOKEN, build, family
from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

# Attention is merged except where the model's own has soft-capping, where keys and values have other sizes, and where
# prompts are not shared (longrope)
UNMERGED = {"gemma2", "deepseek_v3", "phi3 longrope", "kimi_linear"}
QUICK = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "internvl", "qwen3_5_text", "lfm2")
KINDS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*ATTENTION, *STATES)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_scores_and_decodes_what_whole_rows_do(name, monkeypatch):
    """Rows that decode go past the windows, and their cache makes room and drops every four tokens."""
    merged = mock.Mock(side_effect=prefix_cache.attention_with_lse)
    monkeypatch.setattr(prefix_cache, "attention_with_lse", merged)
    monkeypatch.setattr(prefix_cache, "MIN_NEW_STEPS", 4)
    result = check(kind(name))
    assert (result.verdict, result.generation) == (SHARED, "same"), result
    assert merged.called == (name not in UNMERGED)


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
