"""Rules of the simulation that a training on a CPU does not show. JSON."""

import json
from dataclasses import replace

import current_fork  # noqa: F401
import torch

from rloo_memory import models
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.offloaded import offloaded
from rloo_memory.plan.simulation.replaced import dropout
from rloo_memory.plan.simulation.simulate import Simulation


def reward_rows(setup: Setup) -> int:
    """Rows of the reward model's pass."""
    rows = []

    class Watched(Simulation):
        def load(self):
            super().load()
            self.reward_model.register_forward_pre_hook(
                lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
            )

    Watched(setup, models.shape_config("tiny-qwen3", 512)).run()
    return rows[0]


def goes_to_the_host(dtype, elements: int) -> bool:
    """Whether a tensor that is saved for the backward does."""
    memory = LiveBytes()
    x = torch.ones(elements, dtype=dtype, requires_grad=True)
    with memory, offloaded(torch.nn.Linear(1, 1), memory):
        y = x.double().exp() if dtype == torch.float64 else x.exp()
        return memory.live["host"] > 0 and y.requires_grad


base = Setup(64, max_completion_length=16, reward_model="policy", device="cpu", padded=False)
budget = replace(base, tokens_per_forward=3 * 80)
memory = LiveBytes()
with memory:
    x = torch.ones(1000, requires_grad=True)
    before = memory.total
    y = dropout(x, 0.5)
print(
    json.dumps(
        {
            "reward rows": {
                "stock": reward_rows(base),
                "stock-tokens": reward_rows(budget.arm("stock-tokens")),
                "shared": reward_rows(base.arm("shared")),
                "less than a row": reward_rows(replace(budget, tokens_per_forward=20).arm("shared")),
            },
            "offloaded from 1,024 bytes on": [
                goes_to_the_host(torch.float32, 255),
                goes_to_the_host(torch.float32, 256),
                goes_to_the_host(torch.bfloat16, 511),
                goes_to_the_host(torch.bfloat16, 512),
            ],
            "dropout keeps a byte an element": (memory.total - before - y.nbytes) / len(x),
        }
    )
)
