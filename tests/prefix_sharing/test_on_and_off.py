"""How sharing is switched on and off: what is refused, and what it leaves behind."""

import copy
import gc
import re
import weakref

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, TrainerCallback

from experiments.checks.tiny_families import VOCAB
from experiments.config import ROOT
from rloo_memory import share_prompts

from .conftest import Fixed, weights_of


def test_the_program_of_readme_trains(tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    small = f"max_completion_length=6, max_steps=1, bf16=False, output_dir={str(tmp_path)!r}"
    for text, instead in (('"Qwen/Qwen3-8B"', '"tiny-Qwen3ForCausalLM"'), ("max_completion_length=512", small)):
        assert program.count(text) == 1, text
        program = program.replace(text, instead)
    names = {"dataset": Dataset.from_dict({"prompt": ["the sky is blue and", "the sea"]})}
    exec(program, names)
    assert names["trainer"].prompt_sharing and names["trainer"].state.global_step == 1


def test_what_is_removed_leaves_nothing_behind(build):
    trainer, tokens = build(Fixed, 2), []
    forward, sharing = trainer.model.forward, share_prompts(trainer)
    with pytest.raises(ValueError, match=r"shares its prompts already: call `trainer.prompt_sharing.remove\(\)`"):
        share_prompts(trainer)
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    trainer.train()
    shared = sum(tokens)
    model, ids = copy.deepcopy(trainer.model), torch.tensor([[2, 3, 4, 5]])
    model.lm_head.weight.data.zero_()  # of a model of its own
    scored = [x(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.std() for x in (model, trainer.model)]
    assert scored[0] < 1e-3 < scored[1]
    sharing.remove()
    assert not {"train", "training_step", "_prepare_inputs", "prompt_sharing"} & vars(trainer).keys()
    assert trainer.model.forward == forward
    tokens.clear()
    trainer.train()
    assert shared < 0.5 * sum(tokens)


class Misplaced(Fixed):
    """Has a forward that scores other columns when it is given fewer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        forward = self.model.forward

        def scored(*args, labels, **kwargs):
            return forward(*args, labels=labels.roll(int(labels.shape[1] > 16), 1), **kwargs)

        self.model.forward = scored


@pytest.mark.parametrize("beta", [0.0, 0.04])  # with a reference, whose forward is in order, scored first
def test_what_does_not_fit_is_found_in_the_first_batch(build, beta):
    trainer = build(Misplaced, 2, beta=beta)
    share_prompts(trainer)
    with pytest.raises(RuntimeError, match="from those of whole rows, more than .* Misplaced does not fit"):
        trainer.train()
    ids = torch.arange(3, 3 + 8 * 34).view(8, 34) % VOCAB
    ids[:, :30] = ids[0, :30]
    mask = torch.ones_like(ids)
    mask[:2, 30:] = 0  # as of truncated completions
    with torch.no_grad(), pytest.raises(RuntimeError, match="from those of whole rows, more than"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)


def test_several_trainers_share_one_model_in_any_order(build, policy):
    """As a cell of a notebook that runs twice. A trainer that is given up is not kept alive."""
    weights = {}
    for shared in (False, True):
        model = LlamaForCausalLM.from_pretrained(policy).double()
        first, second = (build(Fixed, 8, model=model, beta=0.0) for _ in range(2))
        for trainer in (first, second) if shared else ():
            share_prompts(trainer)
        first.train()
        if shared:
            first.prompt_sharing.remove()
        second.train()
        weights[shared] = weights_of(second)
        if shared:
            forward, gone = type(model).forward, weakref.ref(first)
            del first, trainer
            gc.collect()
            assert gone() is None
            second.prompt_sharing.remove()
            assert vars(model).get("forward") is None or model.forward.__func__ is not forward
            assert not hasattr(model.base_model, "_prefix_sharing")
    assert (weights[True] - weights[False]).norm() <= 1e-9 * weights[False].norm()


def test_a_refusal_leaves_another_trainers_model_as_it_was(build, policy):
    model = LlamaForCausalLM.from_pretrained(policy)
    first, second = (build(Fixed, 8, model=model, beta=0.0) for _ in range(2))
    share_prompts(first)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="load it with `attention_dropout=0.0`, which `disable_dropout=True`"):
        share_prompts(second)
    assert not {"training_step", "prompt_sharing"} & vars(second).keys()
    model.model.layers[0].self_attn.attention_dropout = 0.0
    first.train()


def test_what_is_removed_within_an_update_leaves_its_gradients(train):
    def renewed(trainer):
        def renew(*args, **kwargs):
            trainer.prompt_sharing.remove()
            share_prompts(trainer)

        callback = TrainerCallback()
        callback.on_substep_end = renew
        trainer.add_callback(callback)

    expected, *_ = train(Fixed, 2)
    weights, *_ = train(Fixed, 2, share={}, prepare=renewed)
    assert (weights - expected).norm() <= 1e-9 * expected.norm()


def test_to_remove_it_within_a_step_is_told(build):
    trainer = build(Fixed, 8)
    share_prompts(trainer)
    removes = [lambda prompts, **given: trainer.prompt_sharing.remove() or [0.0] * len(prompts)]
    rewards, trainer.reward_funcs = trainer.reward_funcs, removes
    with pytest.raises(RuntimeError, match="was called within a step"):
        trainer.train()
    trainer.reward_funcs = rewards
    trainer.train()


@pytest.mark.parametrize(
    "settings, said",
    [
        *(
            ({"tokens_per_forward": value}, rf"tokens_per_forward \({value}\) must be a whole number of at least 1")
            for value in (0, float("nan"), 1.5, True)
        ),
        ({"prefix_sharing": False}, "would change nothing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, said, build):
    with pytest.raises(ValueError, match=said):
        share_prompts(build(Fixed, 8), **settings)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(ValueError, match="object has no `train`"):
        share_prompts(object())
