"""Real shapes on a device: seconds and peaks of each phase of a step, for every way to train.

Every way is TRL's RLOO trainer on random weights that are made on the device, with `share_prompts` or without. A
model's name ends with where completions come from: `sampled` ones are generated; `given` ones are drawn by us, so that
long ones cost no time, and `ragged` ones differ in length as well. A number there is that of the tokens with which
several prompts begin, as behind a system prompt; these completions are sampled.
"""

import contextlib
import copy
import gc
import os
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from unittest import mock

import pandas

from experiments.bench.samples import Cell
from experiments.checks.setup_trainer import build_trainer, text_dataset, train
from experiments.measuring import Place
from experiments.run_device import keep_freed_memory, outside_pool
from rloo_memory import data, models
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.setups import Setup

PHASES = ("generate", "score", "train", "optimizer")
# A number is completions or, if it is larger than k, tokens that go through the model together; with `micro`,
# completions of a micro-batch
WAYS = (
    "stock", "stock-cudnn", "stock-accumulate", "shared-2", "shared-micro-2", "shared-4096", "shared-8192",
    "shared-all", "stock-offload", "shared-2-offload",
)  # fmt: skip
# Of prompts that begin alike: whole rows, each prompt computed once, and what they begin with computed once, too
ALIKE_WAYS = ("stock", "shared-all-each", "shared-all")
SHAPES = {  # built-in shape, LoRA's rank
    "qwen3-0.6b": ("qwen3-0.6b", 0),
    "qwen3-8b-lora": ("qwen3-8b", 16),
    "qwen3-8-layers": ("qwen3-8-layers", 0),
    "tiny-qwen3": ("tiny-qwen3", 0),
    "tiny-qwen3-lora": ("tiny-qwen3", 4),
}
MODELS = tuple(f"{shape}/{completions}" for shape in SHAPES for completions in ("sampled", "given", "ragged"))
ALIKE_MODELS = tuple(f"{shape}/{common}" for shape in SHAPES for common in (2000, 300, 128))
PROMPTS = 4  # of an update, where they begin alike; each is a micro-batch
STEPS = 2  # that are measured of each training, after one that warms up


def setup_of(cell: Cell, way: str, device: str) -> Setup:
    """What the trainer is asked for."""
    half = device == "cuda"
    shape, _, completions = cell.model.partition("/")
    base = Setup(
        prompt_tokens=cell.prompt_tokens,
        max_completion_length=cell.completion_tokens,
        num_generations=cell.k,
        per_device_train_batch_size=cell.k,
        dtype="bfloat16" if half else "float32",
        bf16=half,
        lora_rank=SHAPES[shape][1],
        activation_offloading=way.endswith("-offload"),
        padded=completions == "ragged",
        device=device,
    )
    if completions.isdigit():
        base = replace(base, gradient_accumulation_steps=PROMPTS, steps_per_generation=PROMPTS)
    if not way.startswith("shared"):
        return base.arm("stock-accumulate" if way == "stock-accumulate" else "stock")
    _, passes, *rows = way.split("-")
    if passes == "all":
        return replace(base, prefix_sharing=True)
    if passes == "micro":
        return replace(base.with_rows(int(rows[0])), prefix_sharing=True)
    number = int(passes)  # of completions, or of tokens
    setup = base.with_passes(number) if number <= cell.k else replace(base, tokens_per_forward=number)
    return setup.with_shared_groups()


class Trained:
    """Trainers on one model and prompt, one after the other: each is made anew and leaves nothing behind."""

    steps = STEPS

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        documents, (shape, _) = data.load_documents(), SHAPES[cell.model.partition("/")[0]]
        self.cell, self.device = cell, here.device
        self.is_sampled = not cell.model.endswith(("/given", "/ragged"))
        self.config = models.shape_config(shape, 151_936 if here.device == "cuda" else 2000)
        self.tokenizer = models.build_tokenizer(documents, self.config.vocab_size)
        self.config.pad_token_id, self.config.eos_token_id = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        self.prompts = data.build_prompts(documents, self.tokenizer, cell.prompt_tokens)[:1]

    def sample(self, way: str, memory=None) -> dict[str, float]:
        """One training: medians of its steps but the first. `memory`, if given, counts its peaks (`LiveBytes`). Raises
        what a trainer or a kernel raises."""
        import torch
        from transformers import PrinterCallback

        gc.collect()  # the last trainer; here, as what an earlier one raised held it
        if self.device == "cuda":
            torch.cuda.empty_cache()
        setup, dataset = setup_of(self.cell, way, self.device), text_dataset(self.prompts)
        with tempfile.TemporaryDirectory() as out, made_on(self.device, self.config), kernels_of(way):
            trainer = build_trainer(setup, Path(out), self.tokenizer, dataset, self.cell.model, self.steps + 1)
            if way.endswith("-each"):
                trainer.model.base_model._prefix_sharing.shares_starts = False
            trainer.remove_callback(PrinterCallback)
            phases = PhaseRecorder(Path(out) / "phases.csv", self.device)
            if not self.is_sampled:
                trainer._generate_single_turn = self.in_place_of_generation(phases)
            before = outside_pool(self.device)
            train(trainer, phases, memory)
        outside = max(before, outside_pool(self.device))  # CUDA loads a module when it is first called
        steps = [self.of_step(phases.peaks, step, outside) for step in range(2, self.steps + 2)]
        return {metric: median(step[metric] for step in steps) for metric in steps[0]}

    def in_place_of_generation(self, phases: PhaseRecorder):
        numbers = count()

        def generate(*inputs):
            phases.begin_rollout()
            phases.enter("score")
            return given(self.cell, self.tokenizer, next(numbers))

        return generate

    def of_step(self, peaks: list, step: int, outside: int) -> dict[str, float]:
        """Seconds and peaks of each phase in one step. What follows the optimizer (logs) belongs to none."""
        mine = pandas.DataFrame(peaks).query("step == @step")
        by_phase = mine[: list(mine.phase).index("optimizer") + 1].groupby("phase")
        values = {"step_seconds": 0.0}
        for phase in PHASES if self.is_sampled else PHASES[1:]:
            of_phase = by_phase.get_group(phase)
            values[f"{phase}_seconds"] = round((of_phase.end - of_phase.start).sum(), 5)
            values["step_seconds"] += values[f"{phase}_seconds"]
            for size in ("allocated", "reserved", "resident"):
                if of_phase[f"peak_{size}_bytes"].notna().any():
                    values[f"{phase}_{size}_bytes"] = int(of_phase[f"peak_{size}_bytes"].max())
            if f"{phase}_reserved_bytes" in values:
                values[f"{phase}_device_bytes"] = values[f"{phase}_reserved_bytes"] + outside
        return values


class Alike(Trained):
    """Trainings on prompts that begin alike. On a CPU, each way trains once more before its first sample, with its
    tensors counted."""

    steps = 1

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        super().__init__(cell, ways, here)
        documents, common = data.load_documents(), int(cell.model.partition("/")[2])
        system = data.build_prompts(documents, self.tokenizer, common)[-1][0]["content"]
        own = data.build_prompts(documents, self.tokenizer, cell.prompt_tokens - common)
        self.prompts = [[{"role": "system", "content": system}, *prompt] for prompt in own[:PROMPTS]]
        ids = [data.render(self.tokenizer, prompt) for prompt in self.prompts]
        common = len(os.path.commonprefix(ids))
        prompts, completions = sum(map(len, ids)), PROMPTS * cell.k * cell.completion_tokens
        counts = cell.k * prompts, prompts, prompts - (PROMPTS - 1) * common
        # By way: tokens that go through the model when an update's rows do once
        self.tokens = {way: count + completions for way, count in zip(ALIKE_WAYS, counts, strict=True)}
        self.peaks = {}
        if self.device == "cpu":
            keep_freed_memory()

    def sample(self, way: str, memory=None) -> dict[str, float]:
        from rloo_memory.plan.simulation.live_bytes import LiveBytes

        if self.device == "cpu" and way not in self.peaks:
            counted = super().sample(way, LiveBytes())
            self.peaks[way] = {metric: value for metric, value in counted.items() if metric.endswith("_bytes")}
        return super().sample(way, memory) | self.peaks.get(way, {}) | {"forward_tokens": self.tokens[way]}


def given(cell: Cell, tokenizer, number: int) -> list[list[int]]:
    """Random tokens, the same for every way to train: k rows, of different lengths if they are ragged."""
    import torch

    generator = torch.Generator().manual_seed(number)
    shape, most = (cell.k, cell.completion_tokens), cell.completion_tokens
    ids = torch.randint(10, len(tokenizer), shape, generator=generator).tolist()
    if not cell.model.endswith("/ragged"):
        return ids
    lengths = torch.linspace(max(1, most // 4), most, cell.k).long()[torch.randperm(cell.k, generator=generator)]
    return [row[: length - 1] + [tokenizer.eos_token_id] for row, length in zip(ids, lengths, strict=True)]


def made_on(device: str, hf_config):
    """In here the trainer's models, the reference too, are made on the device with the same random weights: what TRL
    would load from a path."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer import rloo_trainer

    def make(path: str, dtype=torch.float32, **ignored):
        torch.manual_seed(0)
        with torch.device(device):
            # A trainer changes its model's config: `use_cache`, with gradient checkpointing
            model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), dtype=dtype)
        model.config._name_or_path = path
        return model.eval()

    return mock.patch.object(rloo_trainer, "create_model_from_path", make)


def kernels_of(way: str):
    """In here, a way to train has the attention kernels that it asks for: `stock-cudnn` has cuDNN's first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if way != "stock-cudnn":
        return contextlib.nullcontext()
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    return sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True)
