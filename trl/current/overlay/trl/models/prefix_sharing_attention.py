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

"""
Attention that returns its log-sum-exp, so that what queries find in two sets of keys can be merged.

Shape suffixes: B rows, H heads, Q queries, D head size.
"""

import torch


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scaled dot-product attention without a mask, with the logarithm of the sum of the exponentiated scores.

    Args:
        query (`torch.Tensor` of shape `(B, H, Q, D)`):
            Queries. H may be a multiple of the number of key heads.
        key (`torch.Tensor`):
            Keys.
        value (`torch.Tensor`):
            Values.
        is_causal (`bool`):
            Whether queries see only the keys up to their own place.
        scale (`float`, *optional*):
            Factor of the scores. If `None`, the inverse square root of the head size.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Output of shape `(B, H, Q, D)`, and log-sum-exp of shape `(B, H, Q)`.
    """
    if query.device.type == "cpu":
        if query.shape[1] != key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, scale=scale
        )
    num_queries, num_keys = query.shape[2], key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, num_queries, num_keys, 0.0, is_causal, False, scale=scale
    )
    return output.transpose(1, 2), lse
