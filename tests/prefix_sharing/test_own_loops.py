"""Log-probabilities for one's own loop, their gradients, and the programs of docs/own_loops.md."""

import re

import pytest
import torch
from kinds import kind
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks

from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import VOCAB, build, family
from experiments.config import ROOT
from rloo_memory import log_probs, logits_of, shared_prompts
from rloo_memory.prefix_sharing import passes, tree

from .conftest import llama

FAMILIES = {
    "llama": family("llama"),
    "windows and caps": family("gemma2", final_logit_softcapping=5.0),
    "scaled logits": family("granite", logits_scaling=3.0),
    "hybrid": family("qwen3_5_text"),
    "scaled embeddings": family("falcon_h1", embedding_multiplier=2.0),
}
RANDOM = torch.Generator().manual_seed(0)


def ids(number):
    return torch.randint(4, VOCAB, (number,), generator=RANDOM)


BEGIN = ids(30)
LONG = ids(60)
PROMPTS = [torch.cat([BEGIN, ids(12)]), torch.cat([BEGIN, ids(7)]), ids(1)]
ROWS = [0, 0, 1, 0, 2, 1, 2, 1]
COMPLETIONS = [ids(number) for number in (5, 3, 9, 1, 4, 2, 6, 0)]
WEIGHTS = torch.randn(len(ROWS), 9, generator=RANDOM, dtype=torch.float64)


@pytest.fixture(params=[*FAMILIES, "lora", "checkpointing"])
def model(request):
    model = build(FAMILIES.get(request.param, FAMILIES["llama"])).double()
    if request.param == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()
    if request.param == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def whole_row(model, prompt, completion, temperature=1.0):
    logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0]


def whole_rows(model):
    values = torch.zeros_like(WEIGHTS)
    for row, (prompt, completion) in enumerate(zip(ROWS, COMPLETIONS, strict=True)):
        values[row, : len(completion)] = whole_row(model, PROMPTS[prompt], completion, temperature=0.7)
    return values


def gradient(model):
    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return torch.cat(grads)


def assert_same(got, expected):
    assert (got - expected).norm() <= 1e-12 * expected.norm()


# With what two prompts begin with, and without
@pytest.mark.parametrize("saved, tokens_per_forward", [(5, None), (5, 6), (10**6, None)])
def test_log_probs_and_gradients_are_those_of_whole_rows(model, saved, tokens_per_forward, monkeypatch):
    monkeypatch.setattr(tree, "MIN_SAVED_TOKENS", saved)
    with pure_float64():
        expected = whole_rows(model)
        (expected * WEIGHTS).sum().backward()
        expected_gradient = gradient(model)
        values = log_probs(model, [PROMPTS[row] for row in ROWS], COMPLETIONS, tokens_per_forward, temperature=0.7)
        (values * WEIGHTS).sum().backward()
        assert_same(values, expected)
        assert_same(gradient(model), expected_gradient)
        with shared_prompts(model, PROMPTS, temperature=0.7) as shared:
            for part in ([0], [4, 1, 3], [2, 5, 7], [6]):
                arguments = [COMPLETIONS[i] for i in part], [ROWS[i] for i in part]
                with torch.no_grad():  # as of an old policy, of prompts that had gradients and of others
                    before = shared.log_probs(*arguments)
                values = shared.log_probs(*arguments)
                assert_same(values, expected[part][:, : values.shape[1]])
                assert_same(before, values)
                (values * WEIGHTS[part][:, : values.shape[1]]).sum().backward()
        assert_same(gradient(model), expected_gradient)


def test_a_prompt_may_be_an_array_or_a_list_of_its_numbers():
    model, expected = llama(), log_probs(llama(), PROMPTS[0], COMPLETIONS)
    for prompt in (PROMPTS[0].numpy(), list(PROMPTS[0].numpy()), PROMPTS[0].tolist()):
        assert torch.equal(log_probs(model, prompt, COMPLETIONS), expected)
        with shared_prompts(model, prompt) as shared:
            assert torch.allclose(shared.log_probs(COMPLETIONS), expected)


def test_parts_of_several_lengths_have_the_frequencies_of_theirs():
    """With `longrope`, the rows of a part are long or not, and long ones of other lengths than others."""
    with pure_float64():
        model, completions = build(kind("phi3 longrope")).double(), [ids(number) for number in (5, 30, 40)]
        for completion in completions:
            whole_row(model, LONG, completion).sum().backward()
        expected = gradient(model)
        with shared_prompts(model, LONG) as shared:
            for completion in completions:
                shared.log_probs([completion]).sum().backward()
        assert_same(gradient(model), expected)


def test_a_reference_and_a_policy_without_dropout_have_prompts_of_their_own():
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3)
    model = get_peft_model(llama(), config).train()

    def expected():
        return log_probs(model, PROMPTS[0], COMPLETIONS, shares_dropout=True)

    with shared_prompts(model, PROMPTS[0], shares_dropout=True) as shared:
        dropped = shared.log_probs(COMPLETIONS)
        with torch.no_grad():
            with model.disable_adapter():
                assert torch.equal(shared.log_probs(COMPLETIONS), expected())
            model.eval()
            policy = shared.log_probs(COMPLETIONS)
            assert torch.equal(policy, expected())
            model.train()
        dropped.sum().backward()
    assert (dropped - policy).norm() > 1e-3


def test_a_budget_asks_no_other_process(monkeypatch):
    """Processes have prompts of their own, so they do not call the model equally often."""
    monkeypatch.setattr(passes, "has_several_processes", lambda: True)
    assert log_probs(llama(), PROMPTS[0].numpy(), COMPLETIONS, tokens_per_forward=6).isfinite().all()


def test_logits_of_states_are_the_models(model):
    with pure_float64(), torch.no_grad():
        output = model(input_ids=PROMPTS[:1][0][None], output_hidden_states=True, use_cache=False)
        assert torch.equal(logits_of(model, output.hidden_states[-1]), output.logits)


def test_what_is_held_for_a_backward_does_not_grow_with_the_completions():
    """Eight completions of 40 tokens behind a prompt of 400: bytes that autograd keeps, each storage once."""
    model, prompt, completions, held = llama(), ids(400), [ids(40) for _ in range(8)], {}

    def kept(function):
        storages = {}

        def keep(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            result = function()
        own = {param.untyped_storage().data_ptr() for param in model.parameters()}
        return result, sum(x.nbytes() for address, x in storages.items() if address not in own)

    rows = torch.stack([torch.cat([prompt, completion]) for completion in completions])
    _, held["whole"] = kept(lambda: model(input_ids=rows, use_cache=False).logits.log_softmax(-1))
    _, held["shared"] = kept(lambda: log_probs(model, prompt, completions))
    _, held["bounded"] = kept(lambda: log_probs(model, prompt, completions, tokens_per_forward=40))
    with shared_prompts(model, prompt) as shared:
        parts = []
        for completion in completions:
            value, size = kept(lambda: shared.log_probs([completion]))  # noqa: B023
            value.sum().backward()
            parts.append(size)
    held["parts"] = parts[0]
    print({name: round(size / 2**20, 1) for name, size in held.items()})
    assert held["shared"] < held["whole"] / 4 and held["bounded"] < held["whole"] / 6
    assert held["parts"] < held["whole"] / 6 and max(parts[1:]) < held["parts"] / 4


def test_examples_questions_and_answers_go_through_the_model_once():
    """Eight questions with four answers each, behind examples of 800 tokens: 27,728 tokens become 1,572."""
    model, examples, prompts, answers, tokens = llama().eval(), ids(800), [], [], []
    for length in (60, 45, 70, 52, 66, 48, 58, 61):
        prompts += [torch.cat([examples, ids(length)])] * 4
        answers += [ids(6 + 2 * i) for i in range(4)]
    with torch.no_grad():
        expected = [whole_row(model, *pair).sum() for pair in zip(prompts, answers, strict=True)]
        log_probs(model, prompts[0], answers[:1])  # which tries the model
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda module, args: tokens.append(args[0][..., 0].numel())
        )
        scores = log_probs(model, prompts, answers).sum(1)
    assert sum(map(len, prompts + answers)) == 27_728 and sum(tokens) == 1_572
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([PROMPTS[0]], COMPLETIONS), r"`prompts` has 1 texts, and there are 8 completions"),
        (([[]] * 8, COMPLETIONS), r"`prompts\[0\]` must be token ids, of shape \(at least 1,\), and has \(0,\)"),
        ((PROMPTS[0], [[5, 128]]), "A token id is 128, and the model has embeddings of 128 tokens"),
        ((PROMPTS[0], [[5, -100]]), "A token id is -100, and the model has embeddings of 128 tokens"),
        ((PROMPTS[0], [[5]], 0), r"tokens_per_forward \(0\) must be a whole number of at least 1"),
        ((PROMPTS[0], [[5]], None, 0.0), "`temperature` is 0.0, and logits are divided by it"),
        (([], []), "`completions` is empty"),
        (({"input_ids": [5]}, COMPLETIONS), "`prompts` must be token ids, as a tokenizer's `input_ids`, not {"),
    ],
)
def test_arguments_are_refused_by_their_names(arguments, said):
    with pytest.raises(ValueError, match=said):
        log_probs(llama(), *arguments)


def test_models_that_cannot_share_are_refused():
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM \(llama\) cannot share prompts: set `disable_dropout=True`"
    ):
        log_probs(model.train(), PROMPTS[0], COMPLETIONS)
    assert log_probs(model.train(), PROMPTS[0], COMPLETIONS, shares_dropout=True).isfinite().all()
    with shared_prompts(llama(), PROMPTS[0]) as shared:
        with pytest.raises(ValueError, match="`rows` must be 1 numbers from 0 to 0"):
            shared.log_probs([[5]], rows=[1])
    with pytest.raises(RuntimeError, match="is for the `with` block of `shared_prompts`"):
        shared.log_probs([[5, 6]])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_that_changes_inside_of_the_block_is_refused(checkpointing):
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with shared_prompts(model, PROMPTS[0]) as shared:
        shared.log_probs([[5, 6]]).sum().backward()
        with pytest.raises(RuntimeError, match="no longer as they were"), model.disable_adapter():
            shared.log_probs([[5, 6]])
    with pytest.raises(RuntimeError, match="no longer as they were"), shared_prompts(model, PROMPTS[0]) as shared:
        shared.log_probs([[5, 6]]).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_adapter_is_looked_at_that_is_newer_than_the_trial():
    model = llama()
    log_probs(model, PROMPTS[0], COMPLETIONS)
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="PROMPT_TUNING puts learned tokens in front of each sequence"):
        log_probs(model, PROMPTS[0], COMPLETIONS)


PAGE = ROOT / "docs" / "own_loops.md"


@pytest.mark.parametrize("number", range(3))
def test_the_programs_of_the_page_run(number, hub, capsys):
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[number]
    assert program.count('"Qwen/Qwen3-0.6B"') == 1
    program = program.replace('"Qwen/Qwen3-0.6B"', repr(str(hub / "tiny-Qwen3ForCausalLM")))
    exec(program.replace("max_new_tokens=256", "max_new_tokens=8"), {})
    assert capsys.readouterr().out
