"""Random batches: any number of prompts of any length, completions of any length (none included), rows in any order,
any window, passes of any number of completions or tokens, prompts shared or not. Log-probabilities, entropies,
gradients and greedily decoded tokens must equal those of whole sequences, in float64. Hypothesis shrinks what fails.
Prints how many batches were tried of each kind of model."""

import functools
import json
from unittest import mock

import shared_exactness
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from shared_exactness import ARCHITECTURES, VOCAB, passes_of, pure_float64, weights_of_states
from transformers import GenerationConfig

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

# With a window of 1, the cache of transformers itself keeps all
WINDOWS = {f"window {window}": ("mistral", dict(sliding_window=window)) for window in (None, 2, 5, 14)}
DECODED = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=1, disable_compile=True)


@functools.cache
def models(name):
    """The same weights twice: as they are, and prepared for sharing."""
    pair = [shared_exactness.build(name, torch.float64) for _ in range(2)]
    enable_prefix_sharing(pair[1])
    return pair


@st.composite
def batches(draw, longest):
    """(input ids, mask, prompt columns), settings of the passes, checkpointing. Prompts have `longest` tokens at
    most."""
    prompts = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    rows = [(p, draw(st.integers(0, 9))) for p in range(len(prompts)) for _ in range(draw(st.integers(1, 4)))]
    rows = draw(st.permutations(rows))
    columns, width = max(prompts), max(1, *[length for _, length in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    texts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in prompts]
    ids = torch.zeros(len(rows), columns + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(rows):
        ids[row, columns - prompts[prompt] : columns] = texts[prompt]
        ids[row, columns : columns + length] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, columns - prompts[prompt] : columns + length] = 1
    passes = st.one_of(
        st.fixed_dictionaries({"completions_per_forward": st.sampled_from([None, 1, 2, 3])}),
        st.fixed_dictionaries({"tokens_per_forward": st.integers(1, 12)}),
        st.fixed_dictionaries({"tokens_per_forward": st.integers(1, 40), "prefix_sharing": st.just(False)}),
    )
    return (ids, mask, columns), draw(passes), draw(st.booleans())


def try_batches(names, number, longest=9):
    """How many batches were tried of the models of these names."""
    tried = []

    @seed(1)
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(names), batches(longest))
    def check(name, case):
        batch, passes, checkpointing = case
        ids, mask, columns = batch
        whole, shared = models(name)
        whole.train(), shared.train()
        shared.gradient_checkpointing_enable() if checkpointing else shared.gradient_checkpointing_disable()
        with mock.patch.object(shared_exactness, "batch", lambda seed: batch):
            tokens, gradient, _ = shared_exactness.run(whole, "")
            got_tokens, got_gradient, _ = shared_exactness.run(shared, "", passes=passes_of(columns, **passes))
        torch.testing.assert_close(got_tokens, tokens, rtol=1e-10, atol=1e-10)
        assert (got_gradient - gradient).norm() <= 1e-10 * gradient.norm() + 1e-12
        prompts = dict(input_ids=ids[:, :columns], attention_mask=mask[:, :columns], generation_config=DECODED)
        with torch.no_grad():
            expected = whole.eval().generate(**prompts)
            assert torch.equal(generate_with_shared_prefix(shared.eval(), **prompts), expected)
        tried.append(1)

    with pure_float64():
        check()
    return len(tried)


if __name__ == "__main__":
    ARCHITECTURES.update(WINDOWS)
    tried = {"windows": try_batches(list(WINDOWS), 60)}
    for family in ("qwen3.5", "bamba", "lfm2"):
        weights_of_states(family)
        tried[family] = try_batches([family], 10, longest=20)
    print(json.dumps(tried))
