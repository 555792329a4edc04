"""Weights after one update of a tiny model on given completions, with each of the doctor's levers that train the same
on this device, against those without. JSON: the largest difference of a weight, relative to the largest change that
the update made; and that of two levers that train differently."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import tiny
import torch

from experiments.checks.setup_trainer import build_trainer, text_dataset
from rloo_memory.launch.offload import keep_on_host
from rloo_memory.plan.levers import LEVERS, applied
from rloo_memory.plan.setups import Setup

PROMPT, COMPLETION = 64, 8
START = Setup(
    prompt_tokens=PROMPT,
    max_completion_length=COMPLETION,
    num_generations=4,
    per_device_train_batch_size=4,
    steps_per_generation=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
    reward_model="policy",
    dtype="float32",
    bf16=False,
    optim="sgd",
    device="cpu",
)


def trained(setup: Setup, folder: Path, tokenizer, prompts, updates: int = 1) -> torch.Tensor:
    """All weights after the updates. Completions follow from the prompt and the place in its group, whoever asks."""
    torch.manual_seed(0)
    trainer = build_trainer(setup, folder, tokenizer, text_dataset(prompts))
    trainer.args.max_steps, trainer.args.learning_rate = updates, 1.0
    if setup.offload_reference:
        keep_on_host(trainer, trainer.ref_model)
    if setup.offload_reward:
        keep_on_host(trainer, trainer.reward_funcs[0])

    def completions(prompt_ids, *args):
        places = [prompt_ids[:i].count(ids) % setup.num_generations for i, ids in enumerate(prompt_ids)]
        return [
            [(sum(ids) + 31 * place + 7 * token) % 500 + 4 for token in range(setup.max_completion_length)]
            for ids, place in zip(prompt_ids, places, strict=True)
        ]

    trainer._generate_single_turn = completions
    trainer.train()
    return torch.cat([parameter.detach().flatten().double() for parameter in trainer.model.parameters()])


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    before, hf_config, tokenizer, prompts = tiny.save_shape(folder, PROMPT)
    plain = trained(START, folder, tokenizer, prompts)
    update = (plain - before).abs().max()
    result = {"update": update.item()}
    starts = {
        "": START,
        " of shared": replace(START.with_rows(START.num_generations), prefix_sharing=True),
        " of parts": START.with_rows(2),
        " of shared parts": replace(START.with_rows(2), prefix_sharing=True),
    }
    for kind, start in starts.items():
        for lever in LEVERS:
            setup = applied(lever, start, hf_config)
            if setup and lever.exact(start):
                difference = (trained(setup, folder, tokenizer, prompts) - plain).abs().max()
                result[lever.name + kind] = (difference / update).item()
    other = trained(replace(START, max_completion_length=COMPLETION // 2), folder, tokenizer, prompts)
    result["half the completion"] = ((other - plain).abs().max() / update).item()
    # Two updates on one rollout: the second one's completions are of the policy before the first
    two = replace(START, gradient_accumulation_steps=1)
    older, newer = (
        trained(replace(two, steps_per_generation=steps), folder, tokenizer, prompts, updates=2) for steps in (2, 1)
    )
    result["steps_per_generation of two updates"] = ((newer - older).abs().max() / (older - before).abs().max()).item()
    result["said to be exact"] = [lever.exact(two) for lever in LEVERS if lever.name == "steps_per_generation"]
print(json.dumps(result))
