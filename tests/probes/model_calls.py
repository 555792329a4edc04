"""Which model is called with which shapes, with or without gradients, in which order: by the trainer in a real
training, and by the simulation. JSON: for each case, both lists, in which each call stands where it comes first."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import tiny
import torch
from trl.kernels import ChunkedLogProbFunction

from experiments.checks.setup_trainer import build_trainer, text_dataset
from rloo_memory import models
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.heads import FusedHead
from rloo_memory.plan.simulation.simulate import Simulation

PROMPT, COMPLETION = 64, 8
LENGTHS = dict(prompt_tokens=PROMPT, max_completion_length=COMPLETION)
ROWS = dict(num_generations=4, per_device_train_batch_size=4, padded=False)
base = Setup(**LENGTHS, **ROWS, dtype="float32", bf16=False, device="cpu")
rewarded = replace(base, reward_model="policy")
tokens = replace(rewarded, tokens_per_forward=2 * (PROMPT + COMPLETION) + 40)
CASES = {
    "stock": base,
    "stock-accumulate": rewarded.arm("stock-accumulate"),
    "stock-tokens": tokens.arm("stock-tokens"),
    "stock-lora": replace(base, lora_rank=4),
    "shared-two-prompts": replace(base, gradient_accumulation_steps=2, steps_per_generation=2).with_shared_groups(),
    "shared-one": rewarded.with_passes(1).with_shared_groups(),
    "shared-lora": replace(base, lora_rank=4).with_shared_groups(),
    "shared-parts": replace(rewarded.with_rows(1), prefix_sharing=True),
    "shared-parts-lora": replace(base.with_rows(2), prefix_sharing=True, lora_rank=4),
}


class Calls:
    """The calls of backbones and of the LM head: whose, shape of the input, and whether with gradients. Each once."""

    def __init__(self):
        self.seen: dict[tuple, None] = {}

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        self.seen[name, shape, torch.is_grad_enabled() and not torch.is_inference_mode_enabled()] = None

    def watch(self, backbone, reference, reward_model) -> None:
        models = {"policy": backbone, "reference": reference, "reward model": reward_model}
        for name, model in models.items():
            if model is not None:
                model.base_model.register_forward_pre_hook(functools.partial(self.before, name), with_kwargs=True)

    def before(self, name: str, module, args, kwargs) -> None:
        if "forward" in vars(module):  # in place of it, the head is given what the passes computed
            return
        given = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args
        rows, columns = next(tensor for tensor in given if tensor is not None).shape[:2]
        # Rewards are read from text, whose tokens may be others
        self.add(name, (rows,) if name == "reward model" else (rows, columns))

    def watch_head(self, function):
        apply = function.apply

        def recorded(hidden, *args):
            self.add("head", tuple(hidden.shape))
            return apply(hidden, *args)

        return mock.patch.object(function, "apply", recorded)


class WatchedSimulation(Simulation):
    calls: Calls

    def load(self):
        super().load()
        self.calls.watch(self.backbone, self.reference, self.reward_model if self.setup.reward_model else None)


def simulated(setup: Setup, hf_config) -> list:
    simulation = WatchedSimulation(setup, hf_config)
    simulation.calls = Calls()
    with simulation.calls.watch_head(FusedHead):
        simulation.run()
    return list(simulation.calls.seen)


def trained(setup: Setup, folder: Path, tokenizer, prompts) -> list:
    trainer = build_trainer(setup, folder, tokenizer, text_dataset(prompts))
    trainer.args.max_steps = 1
    if setup.uses_passes:
        trainer.prompt_sharing.compared = True  # the first batch is scored whole, too
    policy = trainer.model.get_base_model() if setup.lora_rank else trainer.model
    calls = Calls()
    calls.watch(policy, trainer.ref_model, trainer.reward_funcs[0] if setup.reward_model else None)
    with calls.watch_head(ChunkedLogProbFunction):
        trainer.train()
    return list(calls.seen)


result = {}
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    _, _, tokenizer, prompts = tiny.save_shape(folder, PROMPT)
    hf_config = models.shape_config("tiny-qwen3", 512)
    for name, setup in CASES.items():
        result[name] = [trained(setup, folder, tokenizer, prompts), simulated(setup, hf_config)]
print(json.dumps(result))
