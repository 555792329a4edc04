import pytest
import torch
from datasets import load_dataset

from .sharing_trainers import GRPOConfig, RLOOConfig
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.trainer import saves_time
from rloo_memory.prefix_sharing.tree import Prompts, Tree

from .test_passes import TRAINERS, forward_whole_rows, load, make_inputs


MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"


class TestTokenBudget:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("tokens_per_forward", [1, 40, 1000])
    def test_log_probs_and_gradients(self, tokens_per_forward, gradient_checkpointing):
        model = load(MODEL_ID).train()
        inputs, prompt_length = make_inputs()
        expected, expected_grads = forward_whole_rows(model, inputs)

        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model(**inputs, passes=TokenBudgetPasses(prompt_length, tokens_per_forward))
        outputs.log_probs.sum().backward()

        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs.entropy, expected.entropy[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("tokens_per_forward", [None, 40])
    def test_no_mask_is_needed(self, tokens_per_forward):
        # Rows are padded behind their tokens, which do not see it
        model, masks = load(MODEL_ID), []
        attention = model.model.layers[0].self_attn
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        inputs, prompt_length = make_inputs()
        expected = model(**inputs).log_probs[:, prompt_length - 1 :]
        masks.clear()
        outputs = model(**inputs, passes=TokenBudgetPasses(prompt_length, tokens_per_forward))
        assert masks == [None] * len(masks) and len(masks) > 0
        torch.testing.assert_close(outputs.log_probs, expected, rtol=1e-5, atol=1e-5)

    # Tokens of whole rows, padding included, and with shared prompts
    @pytest.mark.parametrize(
        "prompt_length, lengths, rows_per_micro_batch, tokens_per_forward, expected",
        [
            (2, [40, 40], 2, None, False),  # 84 and 83
            (20, [40, 40], 2, None, True),  # 120 and 101
            (3, [40, 2, 2, 2], 4, None, True),  # 172 and 52
            (3, [40, 2, 2, 2], 1, None, True),  # 58 and 52
            (2, [40, 2, 2, 2], 1, None, False),  # 54 and 51
            (2, [40, 2, 2, 2], 4, 20, False),  # 54 and 51, in passes by length
        ],
    )
    def test_when_sharing_saves_time(self, prompt_length, lengths, rows_per_micro_batch, tokens_per_forward, expected):
        one = torch.arange(prompt_length).repeat(len(lengths), 1)
        for ids in (one, torch.cat([one, one + 50])):  # also of two prompts
            tree = Tree.of(Prompts.of(ids, torch.ones_like(ids)))
            all_lengths = prompt_length + torch.tensor(lengths).repeat(len(ids) // len(lengths))
            assert saves_time(tree, all_lengths, rows_per_micro_batch, tokens_per_forward) == expected

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class):
        dataset = load_dataset("zen", "standard_prompt_only", split="train")
        training_args = config_class(
            output_dir=self.tmp_dir,
            learning_rate=0.1,  # use higher lr because gradients are tiny and default lr can stall updates
            per_device_train_batch_size=3,  # reduce the batch size to reduce memory usage
            num_generations=3,  # reduce the number of generations to reduce memory usage
            max_completion_length=8,  # reduce the completion length to reduce memory usage
            tokens_per_forward=16,
            max_steps=5,
            report_to="none",
        )
        trainer = trainer_class(
            model=MODEL_ID,
            reward_funcs="tiny-Qwen2ForSequenceClassification-2.5",
            args=training_args,
            train_dataset=dataset,
        )
        previous_trainable_params = {n: param.clone() for n, param in trainer.model.named_parameters()}

        trainer.train()

        assert trainer.state.log_history[-1]["train_loss"] is not None
        for n, param in previous_trainable_params.items():
            new_param = trainer.model.get_parameter(n)
            assert not torch.equal(param, new_param), f"Parameter {n} has not changed."

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize(
        "kwargs, match",
        [
            ({"tokens_per_forward": 0}, "tokens_per_forward"),
            ({"tokens_per_forward": 64, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ],
    )
    def test_invalid_config(self, config_class, kwargs, match):
        with pytest.raises(ValueError, match=match):
            config_class(output_dir=self.tmp_dir, num_generations=4, per_device_train_batch_size=4, **kwargs)
