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


from unittest.mock import patch

import pytest
import torch
from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from .testing_utils import TrlTestCase, require_torch_accelerator


TRAINERS = [(RLOOConfig, RLOOTrainer), (GRPOConfig, GRPOTrainer)]


class TestActivationOffloadingTrainers(TrlTestCase):
    def make_trainer(self, config_class, trainer_class, activation_offloading):
        dataset = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
        training_args = config_class(
            output_dir=self.tmp_dir,
            learning_rate=0.1,  # use higher lr because gradients are tiny and default lr can stall updates
            per_device_train_batch_size=3,  # reduce the batch size to reduce memory usage
            num_generations=3,  # reduce the number of generations to reduce memory usage
            max_completion_length=8,  # reduce the completion length to reduce memory usage
            max_steps=2,
            activation_offloading=activation_offloading,
            report_to="none",
        )
        return trainer_class(
            model="trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
            reward_funcs="trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
            args=training_args,
            train_dataset=dataset,
        )

    @require_torch_accelerator
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class):
        params = []
        for activation_offloading in (False, True):
            trainer = self.make_trainer(config_class, trainer_class, activation_offloading)
            trainer.train()
            params.append([param.detach().cpu() for param in trainer.model.parameters()])
        for param, offloaded in zip(*params, strict=True):
            torch.testing.assert_close(offloaded, param)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_context_is_entered_in_every_step(self, config_class, trainer_class):
        # Offloading needs an accelerator; what the trainers do with the context does not
        packed = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed[-1].append(1) or x, lambda x: x)
        with patch(f"{trainer_class.__module__}.get_act_offloading_ctx_manager", lambda model: hooks):
            trainer = self.make_trainer(config_class, trainer_class, activation_offloading=True)
        training_step = trainer.training_step

        def counted(*args, **kwargs):
            packed.append([])
            return training_step(*args, **kwargs)

        trainer.training_step = counted
        trainer.train()
        assert len(packed) == 2 and all(packed)
        torch.ones(1, requires_grad=True).exp()
        assert len(packed) == 2  # left after the step
