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


import pytest
import torch
from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from .testing_utils import TrlTestCase


TRAINERS = [(RLOOConfig, RLOOTrainer), (GRPOConfig, GRPOTrainer)]


class TestRewardModelPasses(TrlTestCase):
    @pytest.mark.parametrize(
        "kwargs, num_rows",
        [
            ({}, [6]),
            ({"prefix_sharing": True}, [6]),
            ({"prefix_sharing": True, "tokens_per_forward": 16}, [2, 2, 2]),
            ({"tokens_per_forward": 1}, [1, 1, 1, 1, 1, 1]),
        ],
    )
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_rewards(self, config_class, trainer_class, kwargs, num_rows):
        training_args = config_class(
            output_dir=self.tmp_dir, per_device_train_batch_size=6, num_generations=3, report_to="none", **kwargs
        )
        trainer = trainer_class(
            model="trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
            reward_funcs="trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
            args=training_args,
            train_dataset=load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train"),
        )
        prompts, completions = ["The sky"] * 6, [" is" * n for n in range(6)]
        reward_model, tokenizer = trainer.reward_funcs[0], trainer.reward_processing_classes[0]
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right")
        with torch.no_grad():
            expected = reward_model(**inputs.to(reward_model.device)).logits
        outputs = []
        reward_model.register_forward_hook(lambda module, args, output: outputs.append(output))

        rewards = trainer._calculate_rewards([{"prompt": p} for p in prompts], prompts, completions, [[1]] * 6)

        torch.testing.assert_close(rewards, expected.float())
        assert [len(output.logits) for output in outputs] == num_rows
        assert all(output.past_key_values is None for output in outputs)
