"""Trainers and models as people have them: what is shared trains as untouched TRL does, and what is not says why."""

import io
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LogitsProcessorList, TopKLogitsWarper, TrainerCallback

import trl
from experiments.checks.tiny_families import VOCAB
from rloo_memory import log_probs, share_prompts

from .conftest import Fixed, weights_of


def scored_rows(inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1), inputs["completion_ids"].size(1)


class HandsOn(trl.GRPOTrainer):
    """Overrides that count or time calls."""

    def _generate_single_turn(self, *args, **kwargs):
        ids, logps = super()._generate_single_turn(*args, **kwargs)
        return [x[:5] for x in ids], logps

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class OtherNames(Fixed):
    def _get_per_token_logps_and_entropies(self, policy, ids, mask, n, batch_size=None, **kwargs):
        return super()._get_per_token_logps_and_entropies(policy, ids, mask, n, batch_size=1, **kwargs)


class ByPosition(Fixed):
    def _compute_loss(self, model, inputs):
        logps, _, _ = self._get_per_token_logps_and_entropies(model, *scored_rows(inputs), None, True)
        loss = -((logps * inputs["completion_mask"]).sum(1) * inputs["advantages"]).mean()
        return loss / self.current_gradient_accumulation_steps


class ScoredTwice(Fixed):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return (logps + super()._get_per_token_logps_and_entropies(*args, **kwargs)[0]) / 2, *rest


class OwnGenerate(trl.GRPOTrainer):
    options = {"logits_processor": LogitsProcessorList([TopKLogitsWarper(5)])}

    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        rows = self.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with torch.no_grad():
            ids = model.generate(**rows, max_new_tokens=5, do_sample=False, **self.options)
        return [row[rows["input_ids"].size(1) :].tolist() for row in ids], None


class Beams(OwnGenerate):
    options = {"num_beams": 2}


class Sorted(Fixed):
    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rows = rollout["completion_mask"].sum(1).sort(stable=True).indices
        return {name: x[rows] if isinstance(x, torch.Tensor) and x.ndim else x for name, x in rollout.items()}


class RowsOfItsOwn(Fixed):
    """As a loss with a term of supervised fine-tuning."""

    def _compute_loss(self, model, inputs):
        rows = torch.arange(10, 22)[None]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, rows, torch.ones_like(rows), 4)
        return super()._compute_loss(model, inputs) - logps.mean()


class GapsInMasks(Fixed):
    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["completion_mask"][1::4, 2] = 0
        return rollout


class RowHook(Fixed):
    """Adds a vector of its own to each row."""

    def _compute_loss(self, model, inputs):
        vectors = inputs["advantages"][:, None, None] * 0.1

        def add(module, args, x):
            return x + vectors

        handle = self.accelerator.unwrap_model(model).model.layers[1].register_forward_hook(add)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            handle.remove()


class FirstOfAll(RowHook):
    """The same, and nothing is scored before the first loss."""

    def __init__(self, args, **kwargs):
        args.beta = 0.0
        super().__init__(args=args, **kwargs)


class BackboneHook(Fixed):
    """Scales what the backbone gives, from before prompts are shared."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

        def scale(module, args, output):
            output.last_hidden_state = output.last_hidden_state * 1.5
            return output

        self.model.base_model.register_forward_hook(scale)


class Clamped(Fixed):
    """A parameter's gradient is clamped behind each micro-batch."""

    def _compute_loss(self, model, inputs):
        if not hasattr(self, "clamped"):
            self.clamped = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda x: x.clamp(-1e-4, 1e-4))
        return super()._compute_loss(model, inputs)


class ScaledLoss(Fixed):
    """Divides a loss by the norm of its gradient."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        return loss / (torch.cat([x.flatten() for x in grads if x is not None]).norm() + 1e-3) / 4


class ReferenceInLoss(Fixed):
    """Scores the reference in the loss, without `no_grad`: another model, or the same one without its adapter."""

    def _compute_loss(self, model, inputs):
        rows = scored_rows(inputs)
        with nullcontext() if self.ref_model else model.disable_adapter():
            before = self._get_per_token_logps_and_entropies(self.ref_model or model, *rows)[0].detach()
        logps = self._get_per_token_logps_and_entropies(model, *rows)[0]
        moved = ((logps - before).square() * inputs["completion_mask"]).mean()
        return super()._compute_loss(model, inputs) + moved


class OwnLogps(Fixed):
    """Takes log-probabilities of logits, for which it calls the model by position."""

    call = staticmethod(lambda model, *rows: model(*rows, return_dict=True, output_hidden_states=False).logits)

    def _get_per_token_logps_and_entropies(self, model, ids, mask, n, *args, **kwargs):
        logits = self.call(model, ids, mask)[:, -n - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, -n:, None])[..., 0]
        return logps, torch.zeros_like(logps), None


class WithoutMask(OwnLogps):
    call = staticmethod(lambda model, ids, mask: model(input_ids=ids).logits)


class Around(OwnLogps):
    """Does without the model's own forward."""

    call = staticmethod(lambda model, *rows: model.lm_head(model.base_model(*rows).last_hidden_state))


# Trainer, rows of a micro-batch, what is said where something goes whole
PATTERNS = [
    *((cls, rows, None) for rows in (8, 2) for cls in (OtherNames, ByPosition, ScoredTwice, Sorted, OwnLogps)),
    (RowsOfItsOwn, 2, None),
    *((cls, 8, None) for cls in (HandsOn, OwnGenerate)),
    (Beams, 8, "with `num_beams=2`, it does not decode one completion a row"),
    (GapsInMasks, 8, "The attention mask of row 1 of the batch is 0 between tokens"),
    *((cls, 8, "The hook `RowHook._compute_loss.<locals>.add` changes what") for cls in (RowHook, FirstOfAll)),
    (RowHook, 2, "The hook `RowHook._compute_loss.<locals>.add` changes what"),
    (WithoutMask, 8, "The model is called without an attention mask that has the shape of `input_ids`"),
    (Clamped, 8, None),
    (Clamped, 2, "prompts are shared within micro-batches only"),
    (ScaledLoss, 8, None),
    (ReferenceInLoss, 2, None),
    (BackboneHook, 2, None),
    (Around, 2, "The loss is computed without `_get_per_token_logps_and_entropies`"),
]


@pytest.mark.parametrize("trainer_class, rows, said", PATTERNS)
def test_subclasses_train_as_without(trainer_class, rows, said, train, told):
    expected, whole_tokens, _ = train(trainer_class, rows)
    weights, tokens, _ = train(trainer_class, rows, share={})
    # Norms and rotary embeddings compute in float32
    assert (weights - expected).norm() <= 1e-9 * expected.norm()
    if said is None:
        assert not told and tokens < 0.5 * whole_tokens
    else:
        assert len(told) == 1 and said in told[0]


def test_a_training_after_an_interruption_is_as_without(train, build, told):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    expected, *_ = train(Fixed, 2, share={})
    trainer, callback = build(Fixed, 2), TrainerCallback()
    share_prompts(trainer)
    callback.on_substep_end = interrupt
    trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.prompt_sharing.passes._trained is None and "begins with a new rollout" in told[0]
    trainer.remove_callback(callback)
    trainer.train()
    assert (weights_of(trainer) - expected).norm() <= 1e-9 * expected.norm()


def test_a_gradient_that_lacks_a_prompts_part_is_not_given(train):
    with pytest.raises(
        RuntimeError, match="in the middle of an update.* set `per_device_train_batch_size` to a multiple"
    ):
        train(ScaledLoss, 2, share={})


def test_reentrant_checkpointing_that_comes_later_is_refused(train):
    class Reentrant(Fixed):
        def compute_loss(self, model, *args, **kwargs):
            model.gradient_checkpointing_enable({"use_reentrant": True})
            return super().compute_loss(model, *args, **kwargs)

    with pytest.raises(RuntimeError, match="is in reentrant gradient checkpointing, which cuts the gradient"):
        train(Reentrant, 2, share={})


def evaluates(trainer):
    trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps = trainer.train_dataset, "steps", 1


def test_the_log_counts_the_tokens_of_the_model(train, capsys):
    _, tokens, logs = train(Fixed, 2, share={}, beta=0.0, gradient_checkpointing=False)
    assert "each prompt is computed once for its 4 completions where they are generated" in capsys.readouterr().out
    logged = [log for log in logs if "loss" in log]
    assert len(logged) == 2 and all(log["prefix_sharing/token_ratio"] > 2 for log in logged)
    compared = 2 * (31 + 9) + (30 + 2 * 10)  # two whole rows of the first batch, and the same in passes
    assert tokens - compared <= sum(log["prefix_sharing/num_tokens"] for log in logged) <= tokens
    # Not of an evaluation between two steps
    evaluated = train(Fixed, 2, share={}, beta=0.0, prepare=evaluates)[2]
    assert sum("eval_loss" in log for log in evaluated) == 2
    trained = [log["prefix_sharing/num_tokens"] for log in evaluated if "loss" in log]
    assert trained == [log["prefix_sharing/num_tokens"] for log in logged]


@pytest.mark.slow
def test_layers_that_are_compiled_train_as_without(train):
    def compiled(trainer):
        for layer in trainer.model.model.layers:
            layer.compile(backend="eager")

    expected, *_ = train(Fixed, 2)
    weights, *_ = train(Fixed, 2, share={}, prepare=compiled)
    assert (weights - expected).norm() <= 1e-9 * expected.norm()
    with pytest.raises(ValueError, match="for layer in model.model.layers: layer.compile"):
        train(Fixed, 2, share={}, torch_compile=True)


LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.3)


def test_an_update_reads_what_the_same_adapter_left(train):
    options = {"peft_config": replace(LORA, lora_dropout=0.0, init_lora_weights=False)}
    expected, whole_tokens, _ = train(ReferenceInLoss, 2, **options)
    weights, tokens, _ = train(ReferenceInLoss, 2, share={}, **options)
    assert (weights - expected).norm() <= 1e-9 * expected.norm() and tokens < 0.5 * whole_tokens

    def changed(change):
        def prepare(trainer):
            trainer.model.add_adapter("other", options["peft_config"])
            callback = TrainerCallback()
            callback.on_substep_end = lambda *args, model, **kwargs: change(model)
            trainer.add_callback(callback)

        return prepare

    def perturb(model):
        with torch.no_grad():
            next(param for param in model.parameters() if param.requires_grad).add_(1e-3)

    def swap(model):
        torch._foreach_mul_([param.data for param in model.parameters()], 1.01)

    for change in (lambda model: model.set_adapter("other"), perturb, swap, torch.nn.Module.zero_grad):
        with pytest.raises(RuntimeError, match="not as they were in the micro-batch before.* between updates"):
            train(Fixed, 2, share={}, prepare=changed(change), **options)


def test_dropout_is_refused_with_what_helps_and_shared_where_it_may_be(train):
    with pytest.raises(ValueError, match=r"\): set `disable_dropout=True`"):
        train(Fixed, 8, share={}, peft_config=LORA)
    expected, whole_tokens, _ = train(Fixed, 8, peft_config=LORA, disable_dropout=True)
    weights, tokens, _ = train(Fixed, 8, share={}, peft_config=LORA, disable_dropout=True)
    assert (weights - expected).norm() <= 1e-9 * expected.norm() and tokens < 0.5 * whole_tokens
    other, tokens, _ = train(Fixed, 8, share={"shares_dropout": True}, peft_config=LORA)
    assert tokens < 0.5 * whole_tokens and (other - expected).norm() > 1e-6 * expected.norm()


def test_dropout_that_comes_later_is_refused(build):
    trainer = build(Fixed, 8, peft_config=LORA, disable_dropout=True)
    share_prompts(trainer)
    trainer.model.add_adapter("other", LORA)
    with pytest.raises(ValueError, match=r"\): set `disable_dropout=True`.*lora_dropout.other` is 0.3"):
        trainer.train()


@pytest.mark.slow
def test_gradients_with_shared_dropout_have_the_mean_of_each_rows_own(policy):
    """60 draws each. Without dropout the gradient is another one, which this test tells apart."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(policy), replace(LORA, init_lora_weights=False)).train()
    random = torch.Generator().manual_seed(0)
    prompt, *completions = (torch.randint(3, VOCAB, (n,), generator=random) for n in (8, 5, 3, 6, 4))
    signs = torch.tensor([1.0, -0.5, 0.7, -1.2])

    def gradients(score, draws):
        found = []
        for _ in range(draws):
            model.zero_grad()
            (score() * signs[:, None]).sum().backward()
            found.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.requires_grad]))
        return torch.stack(found)

    def shared():
        return log_probs(model, prompt, completions, shares_dropout=True)

    def whole():
        return torch.cat([log_probs(model, prompt, [x], shares_dropout=True).sum(1) for x in completions])[:, None]

    def apart(one, other):
        """Squared difference of two means, in that which noise alone has on average."""
        return (
            (one.mean(0) - other.mean(0)).square().sum() / sum(x.var(0).sum() / len(x) for x in (one, other))
        ).item()

    torch.manual_seed(0)
    of_rows, of_shared = gradients(whole, 60), gradients(shared, 60)
    model.eval()
    assert apart(of_shared, of_rows) < 2 < 5 < apart(of_rows, gradients(whole, 2))


def test_a_shared_model_is_saved_exported_and_copied(build):
    trainer = build(Fixed, 8, gradient_checkpointing=False)
    share_prompts(trainer)
    trainer.train()
    file, inputs = io.BytesIO(), {"input_ids": torch.tensor([[5, 6, 7, 8]]), "use_cache": False}
    torch.save(trainer.model, file)
    file.seek(0)
    copies = torch.load(file, weights_only=False), torch.export.export(trainer.model.eval(), (), inputs).module()
    expected = trainer.model(**inputs).logits
    assert all(torch.allclose(model(**inputs).logits, expected) for model in copies)


def test_numbers_that_are_not_finite_are_trls_own(build, told):
    trainer = build(Fixed, 8, beta=0.0)
    trainer.model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.nan)
    share_prompts(trainer)
    trainer.train()
    assert len(told) == 1 and "TRL's own log-probabilities of the first batch are not all finite" in told[0]
