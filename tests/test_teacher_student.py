"""The teacher-student reward beside the same from full logits, in float64, and trainings with it."""

import copy
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.torch,
    # PEFT asks transformers by the old name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
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
    from rloo_memory.models import build_tokenizer

    return build_tokenizer(QUESTIONS + SOLUTIONS + EXPLANATIONS, 300)


def build(name="gpt2", seed=0, vocab_size=300, **options):
    """A model with distributions that are far from uniform, in float64."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=3,
    )
    config = CONFIG_MAPPING[name](**{**shape, **ARCHITECTURES[name], "vocab_size": vocab_size, **options})
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    return model


def ask(reward, tokenizer, rows=(0, 1, 2), explanations=EXPLANATIONS, **options):
    """Call the reward as TRL does, each completion ended by its end token."""
    texts = [explanations[i] for i in rows]
    given = dict(
        prompts=[PROMPTS[i] for i in rows],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts],
        question=[QUESTIONS[i] for i in rows],
        solution=[SOLUTIONS[i] for i in rows],
        trainer_state=None,
    )
    return reward(**{**given, **options})


def make(student, tokenizer, teacher=None, **options):
    from rloo_memory.hooks.teacher_student import TeacherStudentReward

    reward = TeacherStudentReward(student, tokenizer, **({} if teacher else {"kl_weight": 0}), **options)
    reward.teacher = teacher
    return reward


def full_logits(student, teacher, tokenizer, temperature=1.0):
    """The parts from all logits of whole sequences, one row at a time."""
    import torch

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


OF_THE_PAPER = dict(min_weight=0.01, kl_weight=3, max_weight=0.01)  # the defaults
OTHERS = dict(min_weight=0.3, kl_weight=0.7, max_weight=0.2, temperature=0.7)


@pytest.mark.parametrize("name, options", [*((name, {}) for name in ARCHITECTURES), ("qwen3", OTHERS)])
def test_chunks_give_what_full_logits_give(name, options, tokenizer):
    student, teacher = build(name), build(name, seed=1)
    expected = full_logits(student, teacher, tokenizer, options.get("temperature", 1.0))
    assert max(kl for *_, kl in expected) > 0.01
    weights = OF_THE_PAPER | options
    for chunk in (1, 3, 256):
        reward = make(student, tokenizer, teacher, chunk_tokens=chunk, batch_size=1, **options)
        found = ask(reward, tokenizer)
        for i, (mean, low, mean_kl, max_kl) in enumerate(expected):
            assert [x[i] for x in reward.last.values()] == pytest.approx(expected[i], rel=1e-10, abs=1e-10)
            kl = mean_kl + weights["max_weight"] * max_kl
            formula = mean + weights["min_weight"] * low - weights["kl_weight"] * kl
            assert found[i] == pytest.approx(formula, rel=1e-10)


def test_batches_and_padding_do_not_change_the_value(tokenizer):
    student, teacher = build(), build(seed=1)
    expected = ask(make(student, tokenizer, teacher, batch_size=1), tokenizer)
    for size in (2, 4):
        assert ask(make(student, tokenizer, teacher, batch_size=size), tokenizer) == pytest.approx(expected, rel=1e-10)
    alone = [ask(make(student, tokenizer, teacher), tokenizer, rows=(i,))[0] for i in range(3)]
    assert alone == pytest.approx(expected, rel=1e-10)


def test_a_student_that_knows_the_solution_better_gives_a_higher_reward(tokenizer):
    import torch

    student = build()
    before = ask(make(student, tokenizer), tokenizer)
    knows = copy.deepcopy(student)
    optimizer = torch.optim.Adam(knows.parameters(), 1e-3)
    rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in SOLUTIONS]
    for _ in range(10):
        sum(knows(row, labels=row).loss for row in rows if row.shape[1] > 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ask(make(knows, tokenizer), tokenizer)[1] > before[1]  # the solution with several tokens


def test_the_teachers_own_thought_has_no_kl_and_an_empty_one_neither(tokenizer):
    model = build()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    reward = make(model, tokenizer, model)
    ask(reward, tokenizer, prompts=chats)  # teacher and student are one model, asked the same
    assert max(map(abs, reward.last["max_kl"])) < 1e-12
    empty = [EXPLANATIONS[0], "", EXPLANATIONS[2]]
    reward = make(model, tokenizer, build(seed=1))
    ask(reward, tokenizer, explanations=empty)
    assert reward.last["mean_kl"][1] == reward.last["max_kl"][1] == 0 < reward.last["mean_kl"][0]
    ask(reward, tokenizer, explanations=["", "", ""])
    assert reward.last["max_kl"] == [0, 0, 0]


def test_texts_are_taken_as_well_as_chats(tokenizer):
    student, teacher = build(), build(seed=1)
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in PROMPTS]
    for reward in (make(student, tokenizer), make(student, tokenizer, teacher)):
        assert ask(reward, tokenizer, completions=EXPLANATIONS, prompts=texts) == ask(reward, tokenizer)


def test_the_student_reads_its_template(tokenizer):
    student = build()
    chat = ask(make(student, tokenizer), tokenizer)
    head = tokenizer.apply_chat_template(
        [{"role": "user", "content": "{question}"}], add_generation_prompt=True, tokenize=False
    )
    assert ask(make(student, tokenizer, student_template=head + "{explanation}\n\n{solution}"), tokenizer) == chat
    assert ask(make(student, tokenizer, student_template="<t>{explanation}</t>{solution}"), tokenizer) != chat
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    assert ask(make(student, plain), tokenizer) != chat


def test_no_logits_of_more_tokens_than_a_chunk_exist(tokenizer):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                if leaf.shape[-1:] == (300,) and leaf.untyped_storage().data_ptr() not in weights:
                    self.rows = max(self.rows, leaf.numel() // 300)
            return result

    student, teacher = build("qwen3"), build("qwen3", seed=1)
    weights = {x.untyped_storage().data_ptr() for model in (student, teacher) for x in model.parameters()}
    reward = make(student, tokenizer, teacher, chunk_tokens=5)
    with Largest() as small:
        ask(reward, tokenizer)
    reward.chunk_tokens = 1000
    with Largest() as large:
        ask(reward, tokenizer)
    assert small.rows == 5 and large.rows > 20


def test_models_are_left_as_they_were(tokenizer):
    student, teacher = build(), build(seed=1).train()
    teacher.transformer.h[0].eval()
    modes = [module.training for module in teacher.modules()]
    assert ask(make(student, tokenizer, teacher), tokenizer) == ask(make(student, tokenizer, build(seed=1)), tokenizer)
    assert [module.training for module in teacher.modules()] == modes and not student.training
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_an_offloaded_student_is_back_on_the_cpu_after_a_call_even_a_failed_one(tokenizer, monkeypatch):
    student, teacher = build(), build(seed=1)
    expected = ask(make(student, tokenizer, teacher), tokenizer)
    reward, back = make(student, tokenizer, teacher, offload=True), []
    assert ask(reward, tokenizer) == expected
    monkeypatch.setattr(reward._hook, "offload", lambda: back.append(True))
    assert ask(reward, tokenizer) == expected and back == [True]
    with pytest.raises(TypeError):
        ask(reward, tokenizer, completion_ids=None)
    assert back == [True, True]


def test_a_student_by_path_brings_its_tokenizer(tokenizer, tmp_path):
    student = build()
    student.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert ask(make(str(tmp_path), None), tokenizer) == pytest.approx(ask(make(student, tokenizer), tokenizer))


def test_a_teacher_with_adapters_counts_with_them(tokenizer):
    from peft import LoraConfig, get_peft_model

    student, config = build("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    teacher = get_peft_model(build("qwen3", seed=1), config)
    with_adapters = ask(make(student, tokenizer, teacher), tokenizer)
    merged = ask(make(student, tokenizer, copy.deepcopy(teacher).merge_and_unload()), tokenizer)
    plain = ask(make(student, tokenizer, build("qwen3", seed=1)), tokenizer)
    assert with_adapters == pytest.approx(merged, rel=1e-6) and with_adapters != pytest.approx(plain, rel=1e-4)


def test_parts_are_logged_as_means(tokenizer):
    logged = {}
    reward = make(build(), tokenizer, build(seed=1))
    ask(reward, tokenizer, log_metric=logged.__setitem__)
    assert logged == {f"teacher_student/{name}": sum(x) / 3 for name, x in reward.last.items()} and len(logged) == 4
    reward = make(build(), tokenizer)
    ask(reward, tokenizer)
    assert list(reward.last) == ["mean_log_likelihood", "min_log_likelihood"]


def test_what_cannot_give_a_reward_is_refused(tokenizer):
    from rloo_memory.models import build_tokenizer

    student, teacher = build(), build(seed=1)
    with pytest.raises(ValueError, match="2 . 3.*empty"):
        ask(make(student, tokenizer), tokenizer, solution=["\n", "Tuesday", "3"])
    with pytest.raises(TypeError, match="question"):
        make(student, tokenizer)(EXPLANATIONS, solution=SOLUTIONS)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel \(310 tokens\).*GPT2LMHeadModel \(300\).*kl_weight=0"):
        ask(make(student, tokenizer, build(vocab_size=310)), tokenizer)
    reward = make(student, tokenizer, teacher)
    reward.teacher_tokenizer = build_tokenizer(["other words give other tokens"] * 3, 300)
    with pytest.raises(ValueError, match="different vocabularies"):
        ask(reward, tokenizer)
    reward.teacher = None
    with pytest.raises(ValueError, match="no teacher.*attach"):
        ask(reward, tokenizer)
    for template in ("{solution}", "{solution} {explanation}", "{explanation} {solution} and more"):
        with pytest.raises(ValueError, match="student_template"):
            make(student, tokenizer, student_template=template)
    scaled = build()
    forward = scaled.forward
    scaled.forward = lambda *args, **kwargs: SimpleNamespace(logits=2 * forward(*args, **kwargs).logits)
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*LM head"):
        ask(make(scaled, tokenizer), tokenizer)


@pytest.mark.parametrize("fact", [dict(is_fsdp_enabled=True), dict(tools=[print])])
def test_a_teacher_that_cannot_be_asked_is_refused(fact, tokenizer):
    accelerator = SimpleNamespace(state=SimpleNamespace(), unwrap_model=None, autocast=None)
    trainer = dict(accelerator=accelerator, is_fsdp_enabled=False, processing_class=tokenizer, model=None)
    reward = make(build(), tokenizer, build(seed=1))
    with pytest.raises(ValueError, match="kl_weight=0"):
        reward.attach(SimpleNamespace(**{**trainer, **fact}))
    make(build(), tokenizer).attach(SimpleNamespace(**{**trainer, **fact}))


def test_there_are_24_examples_and_the_teacher_reads_question_and_solution():
    from rloo_memory.hooks.teacher_student import examples

    rows = examples()
    assert len(rows) == 24 == len({row["question"] for row in rows})
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user" and row["question"] in message["content"] and row["solution"].strip()
        assert row["solution"] in message["content"]


def test_both_trainers_train_with_it_and_sharing_changes_nothing(probe):
    runs = probe("teacher_student")
    brought = runs.pop("harness")  # by importing the reward: nothing of what measures
    assert brought == ["rloo_memory", "rloo_memory.hooks", "rloo_memory.hooks.teacher_student"]
    assert runs["rloo"] == [pytest.approx(step, abs=2e-3) for step in runs["stock"]]
    for steps in runs.values():
        assert [step[0] for step in steps] == [1, 2]
        for _, reward, mean, low, mean_kl, max_kl in steps:
            assert reward == pytest.approx(mean + 0.01 * low - 3 * (mean_kl + 0.01 * max_kl), abs=5e-3)
            assert max_kl > mean_kl > 0.01
    assert runs["grpo"][0] == pytest.approx(runs["rloo"][0], abs=2e-3)  # before the first update
