import pytest
import torch

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.tree import Prompts, Tree

from .sharing_trainers import SMALL, build_trainer
from .test_offloading import MODEL_ID, REWARD_MODEL_ID, count_layer_forwards
from .test_passes import TRAINERS, forward_whole_rows, load, make_inputs


def forward_micro_batches(model, inputs, prompt_length, in_one_backward=False, **kwargs):
    # Two prompts with three completions each, one a micro-batch
    prompts = Prompts.of(inputs["input_ids"][:, :prompt_length], inputs["attention_mask"][:, :prompt_length])
    tree = Tree.of(prompts, rows_per_backward=1, in_one_backward=in_one_backward)
    log_probs = []
    for row in range(6):
        rows = {name: x[row : row + 1] if torch.is_tensor(x) else x for name, x in inputs.items()}
        outputs = model(**rows, passes=SharedPrefixPasses(prompt_length, tree=tree, first_row=row, **kwargs))
        outputs.log_probs.sum().backward()
        tree.leave(row + 1)
        log_probs.append(outputs.log_probs.detach())
    assert not tree.nodes
    return torch.cat(log_probs)


def assert_same_gradients(model, expected_grads):
    for name, grad in expected_grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)


class TestPrefixSharingMicroBatches:
    @pytest.mark.parametrize("in_one_backward", [False, True])
    def test_frozen_below(self, in_one_backward):
        # No keys and values of the frozen layers have a gradient
        model = load(MODEL_ID).train()
        inputs, prompt_length = make_inputs()
        model.requires_grad_(False)
        model.get_decoder().layers[-1].requires_grad_(True)
        expected, expected_grads = forward_whole_rows(model, inputs)

        enable_prefix_sharing(model)
        log_probs = forward_micro_batches(model, inputs, prompt_length, in_one_backward)
        torch.testing.assert_close(log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        assert all(".layers.1." in name for name in expected_grads)
        assert_same_gradients(model, expected_grads)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class):
        # A higher learning rate, as the gradients are tiny
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "learning_rate": 0.1}
        args = config_class(output_dir=self.tmp_dir, prefix_sharing=True, **SMALL | options)
        trainer = build_trainer(trainer_class, args, reward_funcs=REWARD_MODEL_ID)
        previous_trainable_params = {n: param.clone() for n, param in trainer.model.named_parameters()}
        counts = count_layer_forwards(trainer.model)
        trainer.train()
        assert len(counts) == 2 * (1 + 3)
        for n, param in previous_trainable_params.items():
            new_param = trainer.model.get_parameter(n)
            assert not torch.equal(param, new_param), f"Parameter {n} has not changed."

    @pytest.mark.parametrize("config_class", [config_class for config_class, _ in TRAINERS])
    @pytest.mark.parametrize(
        "kwargs, match",
        [
            ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, "gradient_accumulation_steps"),
            ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, "generation_batch_size|steps_per_gen"),
        ],
    )
    def test_invalid_config(self, config_class, kwargs, match):
        with pytest.raises(ValueError, match=match):
            config_class(
                output_dir=self.tmp_dir,
                num_generations=4,
                per_device_train_batch_size=2,
                prefix_sharing=True,
                **kwargs,
            )
