"""Random batches: any number of prompts of any length, completions of any length (none included), rows in any order,
any window, passes of any number of completions or tokens, prompts shared or not. Log-probabilities, gradients and
greedily decoded tokens must equal those of whole sequences, in float64. Hypothesis shrinks what fails. Prints how many
batches were tried."""

import json

import torch  # noqa: E402, I001
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from shared_exactness import SHAPE, VOCAB, passes_of, pure_float64  # builds the fork and puts it on the path
from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig  # noqa: E402
from trl.generation.shared_prefix import generate_with_shared_prefix  # noqa: E402
from trl.models.prefix_sharing_enabling import enable_prefix_sharing  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

MODELS, tried = {}, []


def models(window):
    """The same weights twice: as they are, and prepared for sharing."""
    if window not in MODELS:
        torch.manual_seed(0)
        config = MistralConfig(**{**SHAPE, "num_hidden_layers": 2}, sliding_window=window)
        pair = [AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double() for _ in range(2)]
        for parameter in pair[0].parameters():
            parameter.data.mul_(4 if parameter.dim() > 1 else 1)
        pair[1].load_state_dict(pair[0].state_dict())
        for model in pair:
            add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        enable_prefix_sharing(pair[1])
        MODELS[window] = pair
    return MODELS[window]


@st.composite
def batches(draw):
    """(input ids, mask, prompt columns, window, settings of the passes, checkpointing)."""
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    rows = [(p, draw(st.integers(0, 5))) for p in range(len(prompts)) for _ in range(draw(st.integers(1, 4)))]
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
    window = draw(st.sampled_from([None, 2, 5]))  # with a window of 1, the cache of transformers itself keeps all
    passes = st.one_of(
        st.fixed_dictionaries({"completions_per_forward": st.sampled_from([None, 1, 2, 3])}),
        st.fixed_dictionaries({"tokens_per_forward": st.integers(1, 12)}),
        st.fixed_dictionaries({"tokens_per_forward": st.integers(1, 40), "prefix_sharing": st.just(False)}),
    )
    return ids, mask, columns, window, draw(passes), draw(st.booleans())


def score(model, ids, mask, columns, **shared):
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :columns] = -100
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **shared)
    tokens = out.log_probs[:, columns - ids.shape[1] :]
    (tokens * torch.linspace(-1, 2, tokens.numel()).view_as(tokens)).sum().backward()
    return tokens.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@seed(1)
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(batches())
def check(case):
    ids, mask, columns, window, passes, checkpointing = case
    whole, shared = models(window)
    whole.train(), shared.train()
    shared.gradient_checkpointing_enable() if checkpointing else shared.gradient_checkpointing_disable()
    tokens, gradient = score(whole, ids, mask, columns)
    got_tokens, got_gradient = score(shared, ids, mask, columns, passes=passes_of(columns, **passes))
    torch.testing.assert_close(got_tokens, tokens, rtol=1e-10, atol=1e-10)
    assert (got_gradient - gradient).norm() <= 1e-10 * gradient.norm() + 1e-12
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=1, disable_compile=True)
    prompts = dict(input_ids=ids[:, :columns], attention_mask=mask[:, :columns], generation_config=config)
    with torch.no_grad():
        expected = whole.eval().generate(**prompts)
        assert torch.equal(generate_with_shared_prefix(shared.eval(), **prompts), expected)
    tried.append(1)


with pure_float64():
    check()
print(json.dumps({"batches": len(tried)}))
