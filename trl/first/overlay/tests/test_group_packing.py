# Copyright 2020-2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

from itertools import pairwise

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config
from transformers.utils import is_peft_available

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.models.group_packing import check_prefix_sharing
from trl.trainer.utils import add_fused_lm_head, shuffle_sequence_dict

from .testing_utils import TrlTestCase, require_peft


if is_peft_available():
    from peft import LoraConfig, PromptTuningConfig, get_peft_model


MODEL_ID = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
TRAINERS = [(RLOOConfig, RLOOTrainer), (GRPOConfig, GRPOTrainer)]
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPT_LENGTH = 7


def make_inputs():
    # Prompts of 7, 5 and 1 tokens with 3, 2 and 1 completions of different lengths
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 60, (6, PROMPT_LENGTH + 5), generator=generator)
    prompts = torch.randint(3, 60, (3, PROMPT_LENGTH), generator=generator)
    input_ids[:, :PROMPT_LENGTH] = prompts.repeat_interleave(torch.tensor([3, 2, 1]), dim=0)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[3:5, :2], attention_mask[5, :6] = 0, 0
    for row, length in enumerate((5, 1, 3, 4, 5, 2)):
        attention_mask[row, PROMPT_LENGTH + length :] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :PROMPT_LENGTH] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "fused_lm_head": True}


def make_model(config_class, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES, **kwargs), dtype=dtype).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


class TestGroupPacking(TrlTestCase):
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
    def test_log_probs_and_gradients(self, config_class, gradient_checkpointing):
        model, inputs = make_model(config_class), make_inputs()
        check_prefix_sharing(model)
        expected = model(**inputs)
        expected.log_probs.sum().backward()
        expected_grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        model.zero_grad()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tokens = []
        model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
        )

        outputs = model(**inputs, prefix_length=PROMPT_LENGTH)
        outputs.log_probs.sum().backward()

        assert tokens == [3 * (7 + 5 + 1 + 3)]  # three packed rows, as long as the longest
        start = PROMPT_LENGTH - 1
        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, start:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outputs.entropy, expected.entropy[:, start:], rtol=1e-5, atol=1e-6)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-6 * grad.abs().max())

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"beta": 0.1, "gradient_accumulation_steps": 2},
            {"beta": 0.0, "num_iterations": 2, "gradient_accumulation_steps": 2},
            {"beta": 0.1, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2},
            {"beta": 0.1, "mask_truncated_completions": True},
            pytest.param({"use_peft": True}, marks=require_peft),
        ],
    )
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class, kwargs):
        dataset = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
        peft_config = None
        if kwargs.get("use_peft"):
            peft_config, kwargs = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0), {}
        params, losses = [], []
        for prefix_sharing in (False, True):
            training_args = config_class(
                output_dir=self.tmp_dir,
                per_device_train_batch_size=6,  # reduce the batch size to reduce memory usage
                per_device_eval_batch_size=2,
                num_generations=3,  # reduce the number of generations to reduce memory usage
                max_completion_length=8,  # reduce the completion length to reduce memory usage
                learning_rate=1e-2,
                optim="sgd",
                max_steps=4,
                bf16=False,
                prefix_sharing=prefix_sharing,
                shuffle_dataset=False,
                report_to="none",
                **kwargs,
            )
            trainer = trainer_class(
                model=MODEL_ID,
                reward_funcs=lambda completion_ids, **kwargs: [float(len(set(ids))) for ids in completion_ids],
                args=training_args,
                train_dataset=dataset,
                eval_dataset=dataset.select(range(2)),
                peft_config=peft_config,
            )
            trainer.train()
            params.append(torch.cat([param.detach().flatten() for param in trainer.model.parameters()]))
            losses.append([log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log])
        torch.testing.assert_close(*params, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)

    def test_batches_hold_whole_groups(self):
        shuffled = shuffle_sequence_dict({"x": torch.arange(12), "y": list(range(12)), "z": None}, group_size=3)
        assert shuffled["x"].tolist() == shuffled["y"] != list(range(12))
        assert sorted(shuffled["y"][::3]) == [0, 3, 6, 9]
        assert all(b - a == 1 for start in range(0, 12, 3) for a, b in pairwise(shuffled["y"][start : start + 3]))

    def test_unsupported_attention(self):
        with pytest.raises(ValueError, match="'eager'"):
            check_prefix_sharing(make_model(LlamaConfig, attn_implementation="eager"))
        with pytest.raises(ValueError, match="sliding window 4096"):
            check_prefix_sharing(make_model(MistralConfig))

    def test_dropout(self):
        with pytest.raises(ValueError, match="attention_dropout"):
            check_prefix_sharing(make_model(LlamaConfig, attention_dropout=0.5))

    @require_peft
    def test_adapters(self):
        # Dropout of adapters, whose output is zero before the first update
        with pytest.raises(ValueError, match="lora_dropout"):
            check_prefix_sharing(get_peft_model(make_model(LlamaConfig), LoraConfig(lora_dropout=0.1)))
        prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(ValueError, match="learned tokens"):
            check_prefix_sharing(get_peft_model(make_model(LlamaConfig), prompt_tuning))

    @pytest.mark.parametrize("row, columns", [(5, slice(PROMPT_LENGTH)), (4, PROMPT_LENGTH + 2)])
    def test_empty_prompt_and_mask_with_a_hole(self, row, columns):
        model, inputs = make_model(LlamaConfig), make_inputs()
        inputs["attention_mask"][row, columns] = 0
        with pytest.raises(ValueError, match=f"row {row}"):
            model(**inputs, prefix_length=PROMPT_LENGTH)

    @pytest.mark.parametrize("kwarg", ["fused_lm_head", "shift_labels", "output_router_logits", "position_ids"])
    def test_unsupported_arguments(self, kwarg):
        inputs = make_inputs() | {kwarg: kwarg != "fused_lm_head"}
        with pytest.raises(ValueError, match=kwarg):
            make_model(LlamaConfig)(**inputs, prefix_length=PROMPT_LENGTH)

    def test_router_logits_in_the_config(self):
        # As experts have that train with `router_aux_loss_coef=0.0`
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        model, inputs = make_model(MixtralConfig, dtype=torch.float32, **experts), make_inputs()
        expected = model(**inputs).log_probs[:, PROMPT_LENGTH - 1 :]
        outputs = model(**inputs, prefix_length=PROMPT_LENGTH)
        torch.testing.assert_close(outputs.log_probs, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize(
        "kwargs, match",
        [
            ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, "multiple of num_generations"),
            ({"neftune_noise_alpha": 5.0}, "neftune"),
            ({"use_liger_kernel": True}, "liger"),
            ({"torch_compile": True}, "torch_compile"),
        ],
    )
    def test_invalid_config(self, config_class, kwargs, match):
        kwargs = {"per_device_train_batch_size": 4, **kwargs}
        with pytest.raises(ValueError, match=match):
            config_class(output_dir=self.tmp_dir, num_generations=4, prefix_sharing=True, **kwargs)
