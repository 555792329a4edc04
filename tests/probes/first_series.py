"""The short series on every architecture in float64: what it is refused for, or the largest relative error of
log-probabilities, entropies and gradients, with checkpointing and without. The LM head is that of the fork.
"""

import json
from dataclasses import dataclass

import torch
from shared_exactness import ARCHITECTURES, batch, build, error, run

from experiments.bench.rivals import first_series
from experiments.checks.float64 import pure_float64
from rloo_memory.prefix_sharing.passes import PassesOutput

first = first_series()


@dataclass(frozen=True)
class Packed:
    prefix_length: int

    def forward(self, backbone, input_ids, attention_mask):
        output = first.shared_forward(backbone, input_ids, attention_mask, self.prefix_length)
        return PassesOutput(output.last_hidden_state)


result = {}
with pure_float64():
    for name in ARCHITECTURES:
        model = build(name, torch.float64)
        try:
            first.check_prefix_sharing(model)
        except ValueError as problem:
            result[name] = str(problem)
            continue
        truth, errors = run(model, "")[:2], []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            got = run(model, "", passes=Packed(batch()[2]))
            errors += [error(x, y) for x, y in zip(got, truth, strict=False)]
        result[name] = max(errors)
print(json.dumps(result))
