from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import TrainerCallback

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.images import count_tiles

from .sharing_trainers import SMALL, GRPOConfig, GRPOTrainer, RLOOConfig, build_trainer
from .test_micro_batches import MODEL_ID, assert_same_gradients, forward_micro_batches
from .test_passes import TRAINERS, forward_whole_rows, load, make_inputs

pytestmark = pytest.mark.slow


def reward_by_row(completions, **kwargs):
    return [float(row % 3 == 1) for row in range(len(completions))]


class WithOtherPrompts:
    # As an environment whose `reset` tells each rollout something else
    def _tokenize_prompts(self, prompts):
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        return [ids + [30 + row % 2] for row, ids in enumerate(prompt_ids)], images, multimodal_fields


class WithRowsOfItsOwn:
    # As a loss with a term of supervised fine-tuning
    def _compute_loss(self, model, inputs):
        rows = torch.randint(10, 100, (1, 12), device=inputs["prompt_ids"].device)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, rows, torch.ones_like(rows), 4)
        return super()._compute_loss(model, inputs) - logps.mean()


class Interrupt(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


class TestPrefixSharingTrainers:
    def make_trainer(self, trainer_class, config_class, **kwargs):
        # Adam would turn rounding in gradients that are zero into steps
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "prefix_sharing": True}
        options |= {"learning_rate": 0.1, "optim": "sgd", "bf16": False, **kwargs}
        args = config_class(output_dir=self.tmp_dir, **SMALL | options)
        return build_trainer(trainer_class, args, ["the sky is blue and", "the sea"] * 3, reward_funcs=reward_by_row)

    def train(self, trainer):
        start = [param.clone() for param in trainer.model.parameters()]
        torch.manual_seed(0)
        trainer.train()
        params = list(trainer.model.parameters())
        assert not torch.equal(start[0], params[0])
        return params

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize(
        "option, version", [({"prefix_sharing": True}, "5.12.1"), ({"tokens_per_forward": 64}, "5.2.0")]
    )
    def test_version(self, config_class, option, version, monkeypatch):
        monkeypatch.setattr(transformers, "__version__", version)
        kwargs = {"output_dir": self.tmp_dir, "num_generations": 4, "per_device_train_batch_size": 4}
        config_class(**kwargs)
        with pytest.raises(ImportError, match=rf"`{next(iter(option))}` requires .* but {version} is installed"):
            config_class(**kwargs, **option)

    @pytest.mark.parametrize("option", [{}, {"tokens_per_forward": 20}])
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_prompts_that_differ_within_a_group(self, config_class, trainer_class, option):
        trainer_class = type(trainer_class.__name__, (WithOtherPrompts, trainer_class), {})
        expected = self.train(self.make_trainer(trainer_class, config_class, prefix_sharing=False))
        params = self.train(self.make_trainer(trainer_class, config_class, **option))
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_rows_of_a_subclass(self, config_class, trainer_class):
        # They share among themselves, in the midst of the micro-batches of a prompt
        trainer_class = type(trainer_class.__name__, (WithRowsOfItsOwn, trainer_class), {})
        expected = self.train(self.make_trainer(trainer_class, config_class, prefix_sharing=False))
        params = self.train(self.make_trainer(trainer_class, config_class))
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_training_after_an_interruption(self, config_class, trainer_class):
        expected = self.train(self.make_trainer(trainer_class, config_class))
        trainer = self.make_trainer(trainer_class, config_class)
        trainer.add_callback(Interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.passes._trained is None
        trainer.remove_callback(Interrupt)
        torch.testing.assert_close(self.train(trainer), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("in_one_backward", [False, True])
    def test_loss_that_is_computed_twice(self, in_one_backward):
        model = load(MODEL_ID).train()
        inputs, prompt_length = make_inputs()
        _, expected_grads = forward_whole_rows(model, inputs)
        enable_prefix_sharing(model)
        forward = model.forward

        def forward_twice(**kwargs):
            forward(**kwargs)  # whose loss has no backward
            return forward(**kwargs)

        model.forward = forward_twice
        forward_micro_batches(model, inputs, prompt_length, in_one_backward)
        assert_same_gradients(model, expected_grads)

    @pytest.mark.parametrize("prefix_sharing", [False, True])
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_attention_of_continuous_batching(self, config_class, trainer_class, prefix_sharing, monkeypatch):
        kwargs = {"prefix_sharing": prefix_sharing, "use_transformers_continuous_batching": True}
        trainer = self.make_trainer(trainer_class, config_class, **kwargs)
        model, seen = trainer.model, []
        set_attn_implementation = model.set_attn_implementation

        def generate_batch(prompt_ids, **kwargs):
            seen.append(model.config._attn_implementation)
            return {row: SimpleNamespace(generated_tokens=[5, 1]) for row in range(len(prompt_ids))}

        def spy(implementation):
            seen.append(implementation)
            set_attn_implementation(implementation)

        monkeypatch.setattr(model, "generate_batch", generate_batch)
        monkeypatch.setattr(model, "set_attn_implementation", spy)
        args = ([[5, 6]] * 3, None, {}) + ((3,) if trainer_class is GRPOTrainer else ())
        trainer._generate_single_turn(*args)
        assert seen == ["sdpa"]

    def test_rows_without_the_images_of_others(self):
        # Those that go on after a tool call, of a batch with images
        assert count_tiles(None, [[], None], [0, 0], {}) is None
