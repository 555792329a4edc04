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


import weakref
from unittest.mock import MagicMock

import pytest
import torch

from trl.models.activation_offloading import OffloadActivations

from .testing_utils import TrlTestCase


class TestActivationOffloadingExit(TrlTestCase):
    @pytest.mark.parametrize("backward", [True, False])
    def test_nothing_outlives_the_context(self, backward, monkeypatch):
        # Tensors that are not the accelerator's are tracked as they are: what is asked here needs none
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        monkeypatch.setattr(torch, "get_device_module", lambda device: MagicMock())
        offloading = OffloadActivations(use_pin_memory=False, use_streams=False)
        weight = torch.ones(4, 4, requires_grad=True)
        with offloading:
            activation = (weight * 2).exp()
            loss = (activation @ weight).sum() + activation.square().sum()
            if backward:
                loss.backward()
        activation = weakref.ref(activation)
        del loss
        assert activation() is None
        assert not offloading.tracker
