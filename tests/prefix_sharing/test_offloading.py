from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import load_dataset
from trl.models import get_act_offloading_ctx_manager

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

from .test_passes import TRAINERS, forward_whole_rows, load, make_inputs

pytestmark = pytest.mark.slow

MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"


def offload_on_cpu(model):
    # Without an accelerator, the CPU stands for one: what is saved is copied, and taken from where the copies are kept
    with patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")):
        manager = get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False)
    manager.device_module = SimpleNamespace(**vars(torch.cpu), empty_cache=lambda: None)
    return manager


def count_layer_forwards(model):
    # A norm and not the layer, whose hooks do not run when it is computed again
    counts = []
    norm = model.get_decoder().layers[0].input_layernorm
    norm.register_forward_pre_hook(lambda *args: counts.append(1) if torch.is_grad_enabled() else None)
    return counts


class TestPrefixSharingOffloading:
    # Two prompts, and two passes or more for each. Number of times that a layer runs: prompts and passes in the
    # forward, each again by layer, and all passes but the last as a whole
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize(
        "make_passes, prompts, passes",
        [
            (lambda p, on: SharedPrefixPasses(p, 1, activation_offloading=on), 2, 6),
            (lambda p, on: SharedPrefixPasses(p, 8, activation_offloading=on), 2, 4),
            (lambda p, on: TokenBudgetPasses(p, 40, activation_offloading=on), 0, 3),
        ],
    )
    def test_log_probs_and_gradients(self, make_passes, prompts, passes, gradient_checkpointing):
        model = load(MODEL_ID).train()
        inputs, prompt_length = make_inputs()
        expected, expected_grads = forward_whole_rows(model, inputs)

        enable_prefix_sharing(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        counts = count_layer_forwards(model)
        for activation_offloading in (False, True):
            model.zero_grad()
            counts.clear()
            with offload_on_cpu(model):
                outputs = model(**inputs, passes=make_passes(prompt_length, activation_offloading))
                outputs.log_probs.sum().backward()

            log_probs = expected.log_probs[:, prompt_length - 1 :]
            torch.testing.assert_close(outputs.log_probs, log_probs, rtol=1e-5, atol=1e-5)
            for name, grad in expected_grads.items():
                torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)
            by_layer = prompts + passes if gradient_checkpointing else 0
            whole = 0 if activation_offloading and gradient_checkpointing else passes - 1
            assert len(counts) == prompts + passes + by_layer + whole

    @pytest.mark.parametrize(
        "kwargs, passes, prompts",
        [({"prefix_sharing": True, "tokens_per_forward": 1}, 3, 1), ({"tokens_per_forward": 1}, 3, 0)],
    )
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class, kwargs, passes, prompts):
        dataset = load_dataset("zen", "standard_prompt_only", split="train")
        managers = []

        def make(model):
            managers.append(offload_on_cpu(model))
            return managers[-1]

        for activation_offloading in (False, True):
            training_args = config_class(
                output_dir=self.tmp_dir,
                per_device_train_batch_size=3,  # reduce the batch size to reduce memory usage
                num_generations=3,  # reduce the number of generations to reduce memory usage
                max_completion_length=8,  # reduce the completion length to reduce memory usage
                max_steps=1,
                activation_offloading=activation_offloading,
                report_to="none",
                **kwargs,
            )
            with patch("trl.models.get_act_offloading_ctx_manager", make):
                trainer = trainer_class(
                    model=MODEL_ID,
                    reward_funcs="tiny-Qwen2ForSequenceClassification-2.5",
                    args=training_args,
                    train_dataset=dataset,
                )
            counts = count_layer_forwards(trainer.model)
            trainer.train()
            whole = 0 if activation_offloading else passes - 1
            assert len(counts) == 2 * (prompts + passes) + whole
            assert len(managers) == activation_offloading
            assert not any(manager.tracker or manager.storage_to_tensor_id for manager in managers)  # behind a step
