"""Real shapes on a device: seconds and peaks of each phase of a step, for every way to train.

Every way is the fork's own RLOO trainer on random weights that are made on the device; `stock` is that trainer with
all of the fork switched off. A model's name ends with where completions come from: `sampled` ones are generated;
`given` ones are drawn by us, so that long ones cost no time, and `ragged` ones differ in length as well.
"""

import contextlib
import gc
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from experiments.bench.samples import Cell
from experiments.checks.kernels import are_right, cudnn_first
from experiments.checks.setup_trainer import build_trainer, text_dataset
from experiments.measuring import Place
from rloo_memory import data, models
from rloo_memory.device import level
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.setups import Setup

PHASES = ("generate", "score", "train", "optimizer")
# A number is completions or, if it is larger than k, tokens that go through the model together; with `micro`,
# completions of a micro-batch
WAYS = (
    "stock", "stock-cudnn", "stock-accumulate", "shared-2", "shared-micro-2", "shared-4096", "shared-8192",
    "shared-all", "shared-2-mask", "stock-offload", "shared-2-offload",
)  # fmt: skip
SHAPES = {  # built-in shape, LoRA's rank
    "qwen3-0.6b": ("qwen3-0.6b", 0),
    "qwen3-1.7b": ("qwen3-1.7b", 0),
    "qwen3-8b-lora": ("qwen3-8b", 16),
    "tiny-qwen3": ("tiny-qwen3", 0),
    "tiny-qwen3-lora": ("tiny-qwen3", 4),
}
COMPLETIONS = ("sampled", "given", "ragged")
STEPS = 2  # that are measured of each training, after one that warms up
WARM_UP_TOKENS = 8  # generated in the step that is thrown away


def shape_of(cell: Cell) -> tuple[str, int, str]:
    """Built-in shape, LoRA's rank, and where completions come from."""
    shape, _, completions = cell.model.partition("/")
    return *SHAPES[shape], completions


def setup_of(cell: Cell, way: str, device: str) -> Setup:
    """What the trainer is asked for, and what the planner predicts."""
    half = device == "cuda"
    _, lora_rank, completions = shape_of(cell)
    base = Setup(
        prompt_tokens=cell.prompt_tokens,
        max_completion_length=cell.completion_tokens,
        num_generations=cell.k,
        per_device_train_batch_size=cell.k,
        dtype="bfloat16" if half else "float32",
        bf16=half,
        lora_rank=lora_rank,
        activation_offloading=way.endswith("-offload"),
        padded=completions == "ragged",
        device=device,
    )
    if not way.startswith("shared"):
        return base.arm("stock-accumulate" if way == "stock-accumulate" else "stock")
    passes = way.split("-")[1]
    if passes == "all":
        return replace(base, prefix_sharing=True)
    if passes == "micro":
        return replace(base.with_rows(int(way.split("-")[2])), prefix_sharing=True)
    number = int(passes)  # of completions, or of tokens
    setup = base.with_passes(number) if number <= cell.k else replace(base, tokens_per_forward=number)
    return setup.arm("shared")


def config_of(cell: Cell, device: str, tokenizer=None):
    """The transformers config; a CPU's vocabulary is small."""
    config = models.shape_config(shape_of(cell)[0], 151_936 if device == "cuda" else 2000)
    if tokenizer is not None:
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return config


class Trained:
    """Trainers on one model and prompt, one after the other: each is made anew and leaves nothing behind."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        documents = data.load_documents("builtin")
        self.cell, self.device, self.kernels = cell, here.device, are_right(here.folder, here.facts)
        self.tokenizer = models.build_tokenizer(documents, config_of(cell, here.device).vocab_size)
        self.prompts = data.build_prompts(documents, self.tokenizer, cell.prompt_tokens)[:1]

    def sample(self, way: str) -> dict[str, float]:
        """One training: medians of its steps but the first. Raises what a trainer or a kernel raises."""
        self.clear()  # here, as what an earlier one raised held its trainer
        with self.trainer(way, STEPS + 1) as (trainer, phases, _):
            before = self.outside_pool()
            trainer.train()
            phases.close()
            outside = max(before, self.outside_pool())  # CUDA loads a module when it is first called
            steps = [self.of_step(phases.peaks, step, outside) for step in range(2, STEPS + 2)]
        return {metric: median(step[metric] for step in steps) for metric in steps[0]}

    @contextlib.contextmanager
    def trainer(self, way: str, steps: int):
        """The trainer of a way, the recorder of its phases, and its completions."""
        from transformers import PrinterCallback

        from experiments.workload.trainers import torch_optimizer

        config = config_of(self.cell, self.device, self.tokenizer)
        setup, dataset = setup_of(self.cell, way, self.device), text_dataset(self.prompts)
        mask = way.startswith("shared") and (way.endswith("-mask") or not self.kernels)
        with tempfile.TemporaryDirectory() as out, made_on(self.device, config), switches(way, mask):
            trainer = build_trainer(setup, Path(out), self.tokenizer, dataset, self.cell.model, steps)
            trainer.remove_callback(PrinterCallback)
            phases = PhaseRecorder(Path(out) / "phases.csv", self.device)
            phases.attach(trainer.model, torch_optimizer(trainer))
            completions = Completions(trainer, self.cell, way, self.tokenizer, phases)
            trainer._generate_single_turn = completions.generate
            yield trainer, phases, completions

    def outside_pool(self) -> int:
        """Bytes that the device holds besides torch's pool; 0 on a CPU."""
        import torch

        return level(self.device) - torch.cuda.memory_reserved() if self.device == "cuda" else 0

    def clear(self) -> None:
        """Let go of the last trainer."""
        import torch

        gc.collect()
        if self.device == "cuda":
            with contextlib.suppress(RuntimeError):  # a device that answers nothing more
                torch.cuda.empty_cache()

    def of_step(self, peaks: list, step: int, outside: int) -> dict[str, float]:
        """Seconds and peaks of each phase in one step. What follows the optimizer (logs) belongs to none."""
        mine = [peak for peak in peaks if peak.step == step]
        names = [peak.phase for peak in mine]
        mine = mine[: names.index("optimizer") + 1] if "optimizer" in names else mine
        values = {"step_seconds": 0.0}
        happened = PHASES if shape_of(self.cell)[2] == "sampled" else PHASES[1:]
        for phase in (phase for phase in happened if phase in names):
            of_phase = [peak for peak in mine if peak.phase == phase]
            values[f"{phase}_seconds"] = round(sum(peak.end - peak.start for peak in of_phase), 5)
            values["step_seconds"] += values[f"{phase}_seconds"]
            for size in ("allocated", "reserved", "resident"):
                found = [value for peak in of_phase if (value := getattr(peak, f"peak_{size}_bytes")) is not None]
                if found:
                    values[f"{phase}_{size}_bytes"] = max(found)
            if f"{phase}_reserved_bytes" in values:
                values[f"{phase}_device_bytes"] = values[f"{phase}_reserved_bytes"] + outside
        return values


class Completions:
    """In the place of the trainer's own generation: completions that are given, or sampled after a short warm-up."""

    def __init__(self, trainer, cell: Cell, way: str, tokenizer, phases: PhaseRecorder):
        self.trainer, self.cell, self.way, self.tokenizer, self.phases = trainer, cell, way, tokenizer, phases
        self.kind, self.sample, self.number = shape_of(cell)[2], trainer._generate_single_turn, 0

    def generate(self, prompt_ids, *more):
        self.number += 1
        if self.kind == "sampled":
            if self.number > 1:
                return self.sample(prompt_ids, *more)
            settings = self.trainer.generation_config
            tokens = self.cell.completion_tokens
            if self.way != "stock-cudnn":  # which plans each number of keys when it first comes up
                tokens = min(WARM_UP_TOKENS, tokens)
            settings.max_new_tokens = settings.min_new_tokens = tokens
            self.sample(prompt_ids, *more)
            settings.max_new_tokens = settings.min_new_tokens = self.cell.completion_tokens
            return self.given()
        self.phases.begin_rollout()
        self.phases.enter("score")
        return self.given()

    def given(self) -> list[list[int]]:
        """Random tokens, the same for every way to train: k rows, of different lengths if they are ragged."""
        import torch

        k, most = self.cell.k, self.cell.completion_tokens
        generator = torch.Generator().manual_seed(self.number)
        ids = torch.randint(10, len(self.tokenizer), (k, most), generator=generator).tolist()
        if self.kind != "ragged":
            return ids
        lengths = torch.linspace(max(1, most // 4), most, k).long()[torch.randperm(k, generator=generator)]
        return [row[: length - 1] + [self.tokenizer.eos_token_id] for row, length in zip(ids, lengths, strict=True)]


@contextlib.contextmanager
def made_on(device: str, hf_config):
    """In here the trainer's models, the reference too, are made on the device with the same random weights: what TRL
    would load from a path."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer import rloo_trainer

    def make(path: str, dtype=torch.float32, **ignored):
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        model.config._name_or_path = path
        return model.eval()

    before = rloo_trainer.create_model_from_path
    rloo_trainer.create_model_from_path = make
    try:
        yield
    finally:
        rloo_trainer.create_model_from_path = before


@contextlib.contextmanager
def switches(way: str, mask: bool):
    """What a way to train switches on beside its settings: cuDNN's attention first, or attention with a mask where
    there are kernels without."""
    from trl.generation import shared_prefix_cache
    from trl.models import prefix_sharing_contexts

    with contextlib.ExitStack() as stack:
        if way == "stock-cudnn":
            stack.enter_context(cudnn_first())
        for module in (prefix_sharing_contexts, shared_prefix_cache) if mask else ():
            stack.callback(setattr, module, "kernels_take", module.kernels_take)
            module.kernels_take = lambda key, value: False
        yield
