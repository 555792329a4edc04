"""Two updates with a batch of 2 and accumulation, k = 4 completions a prompt, beside the same updates with prefix
sharing, in the same batches and in whole groups, in float64. Prints how far apart logs and weights are, and how far
the weights moved."""

import copy  # noqa: I001
import json
import logging
import sys
import tempfile
from pathlib import Path

from shared_trainer import PROMPTS, SHAPE, TOKENIZER, reward  # puts the fork on the path
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def train(folder, batch, accumulation, shared):
    make_config, make_trainer = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[sys.argv[1]]
    arguments = make_config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_generations=4,
        max_steps=2,
        max_completion_length=6,
        learning_rate=1e-2,
        optim="sgd",  # Adam would turn rounding in gradients that are zero into steps
        seed=1,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float64},
        **(dict(prefix_sharing=True, tokens_per_forward=2 * 7 if batch > 2 else None) if shared else {}),
    )
    rows = Dataset.from_dict({"prompt": PROMPTS * 2})
    run = make_trainer(
        str(folder / "policy"), reward, arguments, train_dataset=rows, processing_class=copy.deepcopy(TOKENIZER)
    )
    start = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
    run.train()
    logs = [(log["loss"], log["reward"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
    return torch.tensor(logs), torch.cat([p.detach().flatten() for p in run.model.parameters()]) - start


logging.disable(logging.WARNING)
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE))
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.to(torch.float64).save_pretrained(folder / "policy")
    logs, moved = train(folder, 2, 4, shared=False)
    result = {}
    for batch, accumulation in ((2, 4), (4, 2), (8, 1)):
        others, steps = train(folder, batch, accumulation, shared=True)
        apart = {"logs": (others - logs).abs().max().item(), "weights": ((steps - moved).norm() / moved.norm()).item()}
        result[f"{batch} x {accumulation}"] = apart
print(json.dumps({"moved": moved.norm().item(), "grad_norm": logs[:, 2].min().item(), "apart": result}))
