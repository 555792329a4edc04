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

from trl.prefix_sharing.enabling import enable_prefix_sharing
from trl.prefix_sharing.micro_batches import OpenPrefix
from trl.prefix_sharing.shared_passes import SharedPrefixPasses

from .test_prefix_sharing import forward_whole_rows, load
from .test_prefix_sharing_micro_batches import assert_same_gradients
from .testing_utils import TrlTestCase


MODEL_ID = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"


def make_inputs(prompt_length, lengths):
    """Completions of these lengths to one prompt."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(10, 100, (len(lengths), prompt_length + max(lengths)), generator=generator)
    input_ids[:, :prompt_length] = input_ids[0, :prompt_length]
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        attention_mask[row, prompt_length + length :] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt_length] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "fused_lm_head": True}


class TestShortPrompts(TrlTestCase):
    # Tokens of whole rows, padding included, and with a shared prompt: 84 and 81; 120 and 101; 172 and 52
    @pytest.mark.parametrize(
        "prompt_length, lengths, forwards",
        [(2, [40, 40], [(2, 42)]), (20, [40, 40], [(1, 19), (1, 82)]), (3, [40, 2, 2, 2], [(1, 2), (1, 50)])],
    )
    def test_log_probs_and_gradients(self, prompt_length, lengths, forwards):
        model, inputs = load(MODEL_ID).train(), make_inputs(prompt_length, lengths)
        enable_prefix_sharing(model)
        expected, expected_grads = forward_whole_rows(model, inputs)
        shapes = []
        model.model.layers[0].register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))

        outputs = model(**inputs, passes=SharedPrefixPasses(prompt_length, whole_if_faster=True))
        outputs.log_probs.sum().backward()

        assert shapes == forwards
        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        assert_same_gradients(model, expected_grads)

    @pytest.mark.parametrize("lengths, shares", [([40, 2], False), ([2, 40], True)])
    def test_the_first_micro_batch_tells_for_the_others(self, lengths, shares):
        model, inputs = load(MODEL_ID).train(), make_inputs(3, lengths)
        enable_prefix_sharing(model)
        _, expected_grads = forward_whole_rows(model, inputs)
        open_prefix = OpenPrefix(num_micro_batches=2)
        for step in range(2):
            open_prefix.enter(step, updates=step == 1)
            rows = {name: x[step : step + 1] if torch.is_tensor(x) else x for name, x in inputs.items()}
            passes = SharedPrefixPasses(3, group_size=1, open_prefix=open_prefix, whole_if_faster=True)
            model(**rows, passes=passes).log_probs.sum().backward()
            assert open_prefix.shares == shares and open_prefix.has_prefix == shares
            open_prefix.backward()
        assert_same_gradients(model, expected_grads)

    @pytest.mark.parametrize(
        "tokens_per_forward, shapes", [(None, [(2, 24), (2, 22)]), (45, [(1, 24), (2, 22), (1, 21)])]
    )
    def test_whole_rows_go_in_passes_by_length(self, tokens_per_forward, shapes):
        model, inputs = load(MODEL_ID).eval(), make_inputs(2, [19, 22, 20, 20])
        enable_prefix_sharing(model)
        expected = model(**inputs).log_probs[:, 1:]
        found = []
        model.model.layers[0].register_forward_pre_hook(lambda module, args: found.append(tuple(args[0].shape[:2])))
        passes = SharedPrefixPasses(2, tokens_per_forward, completions_per_forward=2, whole_if_faster=True)
        torch.testing.assert_close(model(**inputs, passes=passes).log_probs, expected, rtol=1e-5, atol=1e-5)
        assert sorted(found) == sorted(shapes)
