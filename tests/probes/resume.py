"""Trainings that a new trainer resumes from a checkpoint, beside the same trainings straight through.

Six updates with sampled completions in float64. Prints for each scenario how far resumed is from straight, with prefix
sharing and, where that is not zero in stock either, of stock and between the resumed runs of both.
"""

import csv  # noqa: I001
import json
import logging
import math
import sys
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
    "rloo": dict(memory=True),
    "rloo accumulation": dict(gradient_accumulation_steps=2),
    "rloo lora": dict(lora=True, tokens_per_forward=2 * 7),
    "rloo parts of groups": dict(batch=2, gradient_accumulation_steps=2),
    "rloo two iterations": dict(num_iterations=2, save_steps=2),
    "grpo": dict(trainer="grpo", beta=0.05),
    "grpo two batches a generation": dict(trainer="grpo", steps_per_generation=2, save_steps=2),
    # Stock resumes these otherwise than straight through, too
    "rloo inside a generation": dict(steps_per_generation=2, stock=True),
    "grpo inside a generation": dict(trainer="grpo", num_iterations=2, stock=True),
    "rloo in the second epoch": dict(gradient_accumulation_steps=2, prompts=PROMPTS[:4], stock=True),
    "rloo reference follows": dict(sync_ref_model=True, ref_model_sync_steps=1, stock=True),
}


def build(folder, shared, trainer="rloo", batch=4, memory=False, lora=False, prompts=PROMPTS * 2, **options):
    run = build_trainer(
        trainer,
        folder / "out",
        str(folder / "policy"),
        Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if lora else None,
        per_device_train_batch_size=batch,
        max_steps=6,
        prefix_sharing=shared,
        save_strategy="steps",
        model_init_kwargs={"dtype": torch.float64},
        **options,
    )
    if memory:
        run.add_callback(MemoryCallback(run))
    return run


def difference(left, right):
    """Largest relative difference of logs and parameters, and the updates at which only one of the two generated."""
    worst, alone = 0.0, []
    for a, b in zip(left[0], right[0], strict=True):
        alone += [a["step"]] if ("reward" in a) != ("reward" in b) else []
        for name in a.keys() & b.keys():
            if isinstance(a[name], float) and not (math.isnan(a[name]) and math.isnan(b[name])):
                worst = max(worst, abs(a[name] - b[name]) / max(1.0, abs(a[name])))
    moved = (left[1] - right[1]).norm() / right[1].norm()
    return {"logs": worst, "parameters": moved.item(), "alone": alone}


def compare(stock=False, save_steps=3, **options):
    found = {}
    for name in ("stock", "shared") if stock else ("shared",):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            torch.manual_seed(0)
            save_policy(folder / "policy", AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)))
            runs = [build(folder, name == "shared", save_steps=save_steps, **options) for _ in range(2)]
            runs[0].train()
            runs[1].train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{save_steps}"))
            found[name] = [outcome(run, SKIPPED, after=save_steps) for run in runs]
            if options.get("memory"):
                with (folder / "out" / "memory_phases.csv").open() as file:
                    measured = {row["step"] for row in csv.DictReader(file) if row["phase"] == "train"}
                logged = [log["step"] for log in runs[1].state.log_history if "mem_max_alloc_mb" in log]
                found["memory"] = {"logged": logged, "measured": len(measured)}
    logs = found["shared"][0][0]
    result = {name: difference(*runs) for name, runs in found.items() if name != "memory"}
    if stock:
        result["between"] = difference(found["stock"][1], found["shared"][1])
    return {
        **result,
        "memory": found.get("memory"),
        "updates": [log["step"] for log in logs if "loss" in log],
        "grad_norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with whole_groups():
        print(json.dumps({name: compare(**SCENARIOS[name]) for name in SCENARIOS if name.startswith(sys.argv[1])}))
