"""Two updates with a batch of 2 and accumulation, k = 4 completions a prompt, beside the same updates with prefix
sharing, in the same batches and in whole groups, in float64. Prints how far apart logs and weights are, and how far
the weights moved."""

import json  # noqa: I001
import logging
import sys
import tempfile
from pathlib import Path

from shared_trainer import PROMPTS, SHAPE, build_trainer, save_policy
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config


def train(folder, batch, accumulation, shared):
    run = build_trainer(
        sys.argv[1],
        folder / "out",
        str(folder / "policy"),
        Dataset.from_dict({"prompt": PROMPTS * 2}),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",  # Adam would turn rounding in gradients that are zero into steps
        model_init_kwargs={"dtype": torch.float64},
        **(dict(prefix_sharing=True, tokens_per_forward=2 * 7 if batch > 2 else None) if shared else {}),
    )
    start = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
    run.train()
    logs = [(log["loss"], log["reward"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
    return torch.tensor(logs), torch.cat([p.detach().flatten() for p in run.model.parameters()]) - start


logging.disable(logging.WARNING)
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    torch.manual_seed(0)
    save_policy(folder / "policy", AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)), ends=1)
    logs, moved = train(folder, 2, 4, shared=False)
    result = {}
    for batch, accumulation in ((2, 4), (4, 2), (8, 1)):
        others, steps = train(folder, batch, accumulation, shared=True)
        apart = {"logs": (others - logs).abs().max().item(), "weights": ((steps - moved).norm() / moved.norm()).item()}
        result[f"{batch} x {accumulation}"] = apart
print(json.dumps({"moved": moved.norm().item(), "grad_norm": logs[:, 2].min().item(), "apart": result}))
