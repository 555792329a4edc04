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

"""What DeepSpeed ZeRO-3 changes about passes that are recomputed in the backward."""

from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


def layers_alone_recompute(backbone: nn.Module) -> bool:
    """
    Whether the layers of a pass are recomputed one by one, and not all of them when the backward reaches the pass.
    ZeRO-3 keeps the frozen weights that a recomputation gathers until the backward of a later module is done: those of
    the whole model if it recomputes a pass, those of a layer if it recomputes a layer.

    Args:
        backbone ([`~transformers.PreTrainedModel`]):
            Model without its LM head.
    """
    if not is_deepspeed_zero3_enabled() or not backbone.is_gradient_checkpointing:
        return False
    return any(not param.requires_grad for param in backbone.parameters())
