"""Trainings that a new trainer resumes from a checkpoint, beside the same trainings straight through.

Six updates with sampled completions in float64. Prints for each scenario how far resumed is from straight, with prefix
sharing and, where that is not zero in stock either, of stock and between the resumed runs of both.
"""

import copy  # noqa: I001
import csv
import json
import logging
import math
import sys
import tempfile
from pathlib import Path

from shared_trainer import PROMPTS, SHAPE, TOKENIZER, reward  # puts the fork on the path
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3Config
from trl.trainer import grpo_trainer, rloo_trainer

from rloo_memory.hooks.memory_callback import MemoryCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

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
    make_config, make_trainer = (RLOOConfig, RLOOTrainer) if trainer == "rloo" else (GRPOConfig, GRPOTrainer)
    arguments = make_config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=batch,
        num_generations=4,
        max_steps=6,
        max_completion_length=6,
        learning_rate=1e-2,
        seed=1,
        use_cpu=True,
        bf16=False,
        prefix_sharing=shared,
        logging_steps=1,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float64},
        **options,
    )
    run = make_trainer(
        str(folder / "policy"),
        reward,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=copy.deepcopy(TOKENIZER),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if lora else None,
    )
    if memory:
        run.add_callback(MemoryCallback(run))
    return run


def outcome(run, after):
    """What was logged after a step, without times and memory, and the parameters."""
    skipped = ("time", "runtime", "per_second", "mem_", "train_loss", "total_flos")
    logs = [log for log in run.state.log_history if log["step"] > after]
    logs = [{name: x for name, x in log.items() if not any(s in name for s in skipped)} for log in logs]
    return logs, torch.cat([p.detach().flatten() for p in run.model.parameters()])


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


def save_policy(folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE))
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = list(range(3, 63))  # many, so that completions differ in length
    model.to(torch.float64).save_pretrained(folder)


def compare(stock=False, save_steps=3, **options):
    found = {}
    for name in ("stock", "shared") if stock else ("shared",):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            save_policy(folder / "policy")
            runs = [build(folder, name == "shared", save_steps=save_steps, **options) for _ in range(2)]
            runs[0].train()
            runs[1].train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{save_steps}"))
            found[name] = [outcome(run, save_steps) for run in runs]
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
    for module in (rloo_trainer, grpo_trainer):  # whole groups in stock too, or it would train in another order
        shuffle = module.shuffle_sequence_dict
        module.shuffle_sequence_dict = lambda batch, group_size=1, shuffle=shuffle: shuffle(batch, 4)
    print(json.dumps({name: compare(**SCENARIOS[name]) for name in SCENARIOS if name.startswith(sys.argv[1])}))
