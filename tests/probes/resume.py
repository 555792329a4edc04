"""Trainings with prefix sharing that a new trainer resumes from a checkpoint, beside the same straight through.

Six updates with sampled completions in float64. Prints for each scenario how far resumed is from straight.
"""

import json  # noqa: I001
import logging
import math
import tempfile
from pathlib import Path

# Puts the fork on the path
from shared_trainer import PROMPTS, SHAPE, build_trainer, outcome, save_policy, whole_groups
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3Config

from rloo_memory.hooks.memory_callback import MemoryCallback

SKIPPED = ("time", "runtime", "per_second", "mem_", "train_loss", "total_flos")  # of what is logged
SCENARIOS = {
    "rloo": dict(),
    "rloo lora": dict(lora=True, gradient_accumulation_steps=2, tokens_per_forward=2 * 7),
    "rloo parts of groups": dict(batch=2, gradient_accumulation_steps=2),
    "grpo": dict(trainer="grpo", beta=0.05, num_iterations=2, save_steps=2),
    "grpo two batches a generation": dict(trainer="grpo", steps_per_generation=2, save_steps=2),
}


def build(folder, trainer="rloo", batch=4, lora=False, **options):
    run = build_trainer(
        trainer,
        folder / "out",
        str(folder / "policy"),
        Dataset.from_dict({"prompt": PROMPTS * 2}),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if lora else None,
        per_device_train_batch_size=batch,
        max_steps=6,
        prefix_sharing=True,
        save_strategy="steps",
        model_init_kwargs={"dtype": torch.float64},
        **options,
    )
    run.add_callback(MemoryCallback(run))
    return run


def compare(save_steps=3, **options):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        torch.manual_seed(0)
        save_policy(folder / "policy", AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)))
        runs = [build(folder, save_steps=save_steps, **options) for _ in range(2)]
        runs[0].train()
        runs[1].train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{save_steps}"))
        (straight, before), (resumed, after) = (outcome(run, SKIPPED, after=save_steps) for run in runs)
    pairs = [(a[name], b[name]) for a, b in zip(straight, resumed, strict=True) for name in a if name in b]
    numbers = [abs(a - b) for a, b in pairs if isinstance(a, float) and not math.isnan(a)]
    memory = [log["step"] for log in runs[1].state.log_history if "mem_max_alloc_mb" in log]
    moved = (before - after).abs().max().item()
    return {"logs": max(numbers), "compared": len(numbers), "parameters": moved, "memory": memory}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with whole_groups():
        print(json.dumps({name: compare(**scenario) for name, scenario in SCENARIOS.items()}))
