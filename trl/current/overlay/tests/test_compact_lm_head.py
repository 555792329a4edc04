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
from transformers import AutoModelForCausalLM

from trl.kernels import chunked_logprob
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from .testing_utils import TrlTestCase


class TestCompactLMHead(TrlTestCase):
    @pytest.mark.parametrize("num_tokens", [1, 7, 128, 150])
    def test_only_valid_positions_are_scored(self, num_tokens, monkeypatch):
        model = AutoModelForCausalLM.from_pretrained(
            "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", dtype=torch.float32
        )
        add_fused_lm_head(model)
        input_ids = torch.arange(320).view(2, 160) % 100
        labels = input_ids.clone()
        labels[:, : -(num_tokens + 1) // 2] = -100
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        expected = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)
        expected_grad = torch.autograd.grad(expected.sum(), model.lm_head.weight)[0]

        class Counted(chunked_logprob.ChunkedLogProbFunction):
            @staticmethod
            def forward(ctx, hidden, *args):
                assert len(hidden) == (labels[:, 1:] != -100).sum()
                return chunked_logprob.ChunkedLogProbFunction.forward(ctx, hidden, *args)

        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Counted)
        outputs = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        grad = torch.autograd.grad(outputs.log_probs.sum(), model.lm_head.weight)[0]

        torch.testing.assert_close(outputs.log_probs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)

    def test_tiles_are_small_where_torch_folds_them(self, monkeypatch):
        widths = []

        class Counted(chunked_logprob.ChunkedLogProbFunction):
            @staticmethod
            def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, *args):
                widths.append(chunk_size)
                args = (hidden, weight, bias, targets, temperature, chunk_size, *args)
                return chunked_logprob.ChunkedLogProbFunction.forward(ctx, *args)

        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Counted)
        model = AutoModelForCausalLM.from_pretrained("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5")
        add_fused_lm_head(model)
        input_ids = torch.arange(20).view(2, 10)
        model(input_ids=input_ids, labels=input_ids, fused_lm_head=True)
        # As if the device had Triton; its kernels are not called
        monkeypatch.setattr(utils, "_use_triton", lambda device: True)
        model(input_ids=input_ids, labels=input_ids, fused_lm_head=True)

        assert widths == [utils._CHUNKED_LOGPROB_SMALL_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE]
