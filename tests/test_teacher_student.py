"""The teacher-student reward beside the same from full logits, in float64, and trainings with it."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from examples import teacher_student
from rloo_memory.hooks.teacher_student import TeacherStudentReward
from rloo_memory.models import build_tokenizer
from rloo_memory.plan.simulation.live_bytes import LiveBytes

QUESTIONS = ["What is 2 + 3?", "Which day follows Monday? Name {one}.", "What does len('abc') give?"]
SOLUTIONS = ["5", "Tuesday, of course", "3"]
EXPLANATIONS = ["Count on from 2: 3, 4, 5.", "The days have an order.", "Three letters: a, b, c. That is all."]
PROMPTS = [[{"role": "user", "content": f"{QUESTIONS[i]} The solution is {SOLUTIONS[i]}"}] for i in range(3)]
ARCHITECTURES = {
    "qwen3": {},
    "gemma2": dict(final_logit_softcapping=5.0),
    "granite": dict(logits_scaling=3.0),
    "cohere": dict(logit_scale=0.5),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(QUESTIONS + SOLUTIONS + EXPLANATIONS, 300)


def build(name="gpt2", seed=0, vocab_size=300):
    """A model with distributions that are far from uniform, in float64."""
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    config = CONFIG_MAPPING[name](**shape | ARCHITECTURES[name], vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    return model


def ask(reward, tokenizer, explanations=EXPLANATIONS, **options):
    """Call the reward as TRL does, each completion ended by its end token."""
    given = dict(
        prompts=PROMPTS,
        completions=[[{"role": "assistant", "content": text}] for text in explanations],
        completion_ids=[[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in explanations],
        question=QUESTIONS,
        solution=SOLUTIONS,
        trainer_state=None,
    )
    return reward(**given | options)


def make(student, tokenizer, teacher=None, **options):
    reward = TeacherStudentReward(student, tokenizer, **({} if teacher else {"kl_weight": 0}) | options)
    reward.teacher = teacher
    return reward


def full_logits(student, teacher, tokenizer, temperature):
    """The parts from all logits of whole sequences, one row at a time."""

    def log_probs(model, ids):
        return (model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)

    def chat(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    parts = []
    for i, text in enumerate(EXPLANATIONS):
        asked, told = chat([{"role": "user", "content": QUESTIONS[i]}]), chat(PROMPTS[i])
        explanation, gap, solution = (tokenizer(x)["input_ids"] for x in (text, "\n\n", SOLUTIONS[i]))
        with torch.no_grad():
            read = log_probs(student, asked + explanation + gap + solution)
            taught = log_probs(teacher, told + explanation)[len(told) - 1 : -1]
        likelihood = read[-len(solution) - 1 : -1].gather(-1, torch.tensor(solution)[:, None])
        thought = read[len(asked) - 1 : len(asked) + len(explanation) - 1]
        kl = (taught.exp() * (taught - thought)).sum(-1)
        parts.append([x.item() for x in (likelihood.mean(), likelihood.min(), kl.mean(), kl.max())])
    return parts


OF_THE_PAPER = dict(min_weight=0.01, kl_weight=3, max_weight=0.01, temperature=1.0)  # the defaults
OTHERS = dict(min_weight=0.3, kl_weight=0.7, max_weight=0.2, temperature=0.7)


@pytest.mark.parametrize("name, options", [*((name, {}) for name in ARCHITECTURES), ("qwen3", OTHERS)])
def test_chunks_and_batches_give_what_full_logits_give(name, options, tokenizer):
    student, teacher = build(name), build(name, seed=1)
    weights = OF_THE_PAPER | options
    expected = full_logits(student, teacher, tokenizer, weights["temperature"])
    assert max(kl for *_, kl in expected) > 0.01
    for chunk, batch in ((1, 1), (3, 2), (256, 4)):
        reward = make(student, tokenizer, teacher, chunk_tokens=chunk, batch_size=batch, **options)
        logged = {}
        found = ask(reward, tokenizer, log_metric=logged.__setitem__)
        for i, (mean, low, mean_kl, max_kl) in enumerate(expected):
            assert [x[i] for x in reward.last.values()] == pytest.approx(expected[i], rel=1e-10, abs=1e-10)
            kl = mean_kl + weights["max_weight"] * max_kl
            formula = mean + weights["min_weight"] * low - weights["kl_weight"] * kl
            assert found[i] == pytest.approx(formula, rel=1e-10)
        assert logged == {f"teacher_student/{name}": sum(x) / 3 for name, x in reward.last.items()}


def test_texts_count_as_chats_do_and_models_are_left_as_they_were(tokenizer):
    """Also where the student is offloaded."""
    student, teacher = build(), build(seed=1)
    expected = ask(make(student, tokenizer, teacher), tokenizer)
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in PROMPTS]
    reward = make(student, tokenizer, teacher.train(), offload=True)
    assert ask(reward, tokenizer, completions=EXPLANATIONS, prompts=texts) == expected
    assert teacher.training and not student.training


def test_the_kl_of_empty_explanations_is_0(tokenizer):
    reward = make(build(), tokenizer, build(seed=1))
    ask(reward, tokenizer, explanations=[""] * 3)
    assert reward.last["mean_kl"] == reward.last["max_kl"] == [0.0] * 3


def test_a_smaller_chunk_takes_less_memory(tokenizer):
    """By the log-probabilities of the explanation's other tokens, at the least."""
    peaks, models = {}, [build("qwen3", seed, vocab_size=9000) for seed in (0, 1)]
    for chunk in (5, 256):
        with LiveBytes() as memory:
            ask(make(models[0], tokenizer, models[1], chunk_tokens=chunk), tokenizer)
        peaks[chunk] = memory.peak
    longest = max(len(tokenizer(text)["input_ids"]) for text in EXPLANATIONS)
    assert longest > 10 and peaks[256] - peaks[5] > (longest - 5) * 9000 * 8, peaks


def test_a_teacher_with_adapters_counts_with_them(tokenizer):
    student, config = build("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    teacher = get_peft_model(build("qwen3", seed=1), config)
    with_adapters = ask(make(student, tokenizer, teacher), tokenizer)
    merged = ask(make(student, tokenizer, copy.deepcopy(teacher).merge_and_unload()), tokenizer)
    plain = ask(make(student, tokenizer, build("qwen3", seed=1)), tokenizer)
    assert with_adapters == pytest.approx(merged, rel=1e-6) and with_adapters != pytest.approx(plain, rel=1e-4)


def test_what_cannot_give_a_reward_is_refused(tokenizer):
    student = build()
    with pytest.raises(ValueError, match="2 . 3.*empty"):
        ask(make(student, tokenizer), tokenizer, solution=["\n", "Tuesday", "3"])
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel \(310 tokens\).*GPT2LMHeadModel \(300\).*kl_weight=0"):
        ask(make(student, tokenizer, build(vocab_size=310)), tokenizer)
    with pytest.raises(ValueError, match="no teacher.*attach"):
        ask(make(student, tokenizer, kl_weight=3), tokenizer)


@pytest.mark.parametrize("fact", [dict(is_fsdp_enabled=True), dict(tools=[print])])
def test_a_teacher_that_cannot_be_asked_is_refused(fact, tokenizer):
    accelerator = SimpleNamespace(state=SimpleNamespace(), unwrap_model=None, autocast=None, device="cpu")
    trainer = dict(accelerator=accelerator, is_fsdp_enabled=False, processing_class=tokenizer, model=None)
    with pytest.raises(ValueError, match="kl_weight=0"):
        make(build(), tokenizer, build(seed=1)).attach(SimpleNamespace(**trainer | fact))
    make(build(), tokenizer).attach(SimpleNamespace(**trainer | fact))


def test_the_example_trains_with_both_trainers_and_sharing_changes_nothing(capsys):
    runs = {}
    for name, arguments in (("stock", ()), ("rloo", ("--shared",)), ("grpo", ("--algorithm", "grpo", "--shared"))):
        assert teacher_student.main(["--steps", "2", *arguments]) == 0
        rows = [row for row in capsys.readouterr().out.splitlines() if not row.startswith("share_prompts:")]
        runs[name] = [[float(x) for x in re.findall(r"-?\d+\.?\d*", row)] for row in rows]
    assert runs["rloo"] == [pytest.approx(step, abs=2e-3) for step in runs["stock"]]
    for steps in runs.values():
        assert [step[0] for step in steps] == [1, 2]
        for _, total, mean, low, mean_kl, max_kl in steps:
            assert total == pytest.approx(mean + 0.01 * low - 3 * (mean_kl + 0.01 * max_kl), abs=5e-3)
            assert max_kl > mean_kl > 0.01
    assert runs["grpo"][0] == pytest.approx(runs["rloo"][0], abs=2e-3)  # before the first update
