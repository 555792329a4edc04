import pytest
import torch
from transformers import TrainerCallback

from rloo_memory.prefix_sharing.images import count_tiles

from .sharing_trainers import SMALL, TRAINERS, build_trainer

pytestmark = pytest.mark.slow


def reward_by_row(completions, **kwargs):
    return [float(row % 3 == 1) for row in range(len(completions))]


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

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_rows_of_a_subclass(self, config_class, trainer_class):
        # They share among themselves, in the midst of the micro-batches of a prompt
        trainer_class = type(trainer_class.__name__, (WithRowsOfItsOwn, trainer_class), {})
        expected = self.train(self.make_trainer(trainer_class, config_class, prefix_sharing=False))
        params = self.train(self.make_trainer(trainer_class, config_class))
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_training_after_an_interruption(self, config_class, trainer_class, told):
        expected = self.train(self.make_trainer(trainer_class, config_class))
        trainer = self.make_trainer(trainer_class, config_class)
        trainer.add_callback(Interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.passes._trained is None and "begins with a new rollout" in told[0]
        trainer.remove_callback(Interrupt)
        torch.testing.assert_close(self.train(trainer), expected, rtol=1e-4, atol=1e-5)

    def test_rows_without_the_images_of_others(self):
        # Those that go on after a tool call, of a batch with images
        assert count_tiles(None, [[], None], [0, 0], {}) is None
