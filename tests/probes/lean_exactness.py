"""The lean trainer's functions beside the untouched ones of the same module, on left-padded rows in float64.

Prints the largest differences of what is scored and its gradients, and of what is generated.
"""

import json

from experiments.arms import ARMS
from experiments.builds import use_fork

use_fork(ARMS["classic-lean"])

import tiny  # noqa: E402
import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402
from trl.trainer import utils  # noqa: E402

model = tiny.build_model().double()
columns, response = 8, 5
ids = torch.randint(2, tiny.VOCABULARY, (3, columns + response))
ids[1, :3] = 0  # the token of padding


def scored(**logits):
    model.zero_grad()
    kept = utils.forward(model, ids, 0, **logits).logits[:, -response - 1 : -1]
    logprobs = utils.selective_log_softmax(kept, ids[:, columns:])
    (logprobs.sum(1) * torch.arange(len(ids))).sum().backward()
    return [logprobs, *(parameter.grad for parameter in model.parameters())]


def generated(function):
    """Two rows at a time."""
    torch.manual_seed(1)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    settings = GenerationConfig(max_new_tokens=response, temperature=0.7, top_k=0, top_p=1.0, do_sample=True)
    return function(model, ids[:, :columns], 2, 0, settings)


texts, logits = generated(utils.batch_generation)
whole = [*scored(), texts, utils.selective_log_softmax(logits, texts[:, columns:])]
lean = [*scored(logits_to_keep=response + 1), *generated(utils.batch_generation_with_logprobs)]
errors = [(got - expected).abs().max().item() for got, expected in zip(lean, whole, strict=True)]
print(json.dumps({"scored": max(errors[:-2]), "tokens": errors[-2], "generated": errors[-1]}))
