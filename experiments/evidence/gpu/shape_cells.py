"""Real shapes on this device: seconds and peaks of each phase of a step, for every way to train, in one process.

    python -m experiments.evidence.gpu.shape_cells --plan first [--device cuda] [--minutes 5]

Every way is the fork's own RLOO trainer on random weights that are made on the device; `stock` is that trainer with
all of the fork switched off. `sampled` completions are generated; `given` ones are drawn by us, so that long ones cost
no time and may differ in length (`ragged`). Of each visit to a cell, the first step warms up and is thrown away.
Writes one row a step to results/<machine>/cells/<plan>.csv; a cell that runs out of memory is a row that says so. Exit
codes: 0 all is measured, 4 all is and some cells failed, 5 what fitted into --minutes.
"""

import contextlib
import gc
import sys
import tempfile
import time
import traceback
from pathlib import Path

from experiments.builds import use_fork
from experiments.evidence.common import EXIT_TIME, EXIT_VERDICT, FACTS, Parser, Table, minutes, place
from experiments.evidence.gpu.expected_peaks import read_peaks
from experiments.evidence.gpu.kernels import are_right, cudnn_first
from experiments.evidence.gpu.plans import PLANS, Cell
from experiments.evidence.setup_trainer import build_trainer, text_dataset
from rloo_memory import data, models
from rloo_memory.arms import ARMS
from rloo_memory.device import is_out_of_memory, level
from rloo_memory.errors import choose, exit_code
from rloo_memory.phases import PhaseRecorder
from rloo_memory.sizes import GIB

PHASES = ("generate", "score", "train", "optimizer")
SIZES = ("allocated", "reserved", "device", "resident")
OF_CELL = ("model", "lora_rank", "prompt_tokens", "completion_tokens", "k", "completions", "way")
COLUMNS = (
    *OF_CELL, "visit", "step", "status", "error", "attention", *(f"{phase}_seconds" for phase in PHASES),
    *(f"{phase}_{size}_bytes" for size in SIZES for phase in PHASES),
    *(f"{phase}_predicted_bytes" for phase in PHASES), "start_allocated_bytes", "visit_seconds", *FACTS,
)  # fmt: skip
SLOWER = 1.5  # how much longer a visit may take than the longest like it
WARM_UP_TOKENS = 8  # generated in the step that is thrown away


def run(argv: list[str] | None) -> int:
    parser = Parser("gpu.shape_cells", __doc__)
    parser.add_argument("--plan", required=True, help=", ".join(PLANS))
    parser.add_argument("--minutes", type=minutes, default=10**6, help="begin no visit that may take longer")
    parser.add_argument("--predictions", type=Path, help="what experiments.evidence.on_gpu prepare wrote")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    plan = PLANS[choose("plan", args.plan, PLANS)]
    here = place(args, "peft")
    table = Table(here.folder / "cells" / f"{args.plan}.csv", COLUMNS, here.facts, args.fresh)
    table.path.parent.mkdir(exist_ok=True)
    known = read_peaks(args.predictions)
    use_fork(ARMS["shared"])
    bench = Bench(here.device, are_right(here.folder, here.facts))
    for visit in range(plan.visits):
        for cell in plan.cells:
            if table.has(**cell.row, visit=visit):
                continue
            needs = expected(table.rows, cell, plan.stated_s)
            if needs > deadline - time.monotonic():
                print(f"{cell}: not begun, may take {needs:.0f} s", flush=True)
                return EXIT_TIME
            rows = bench.visit(cell, plan.steps)
            happens = PHASES if cell.completions == "sampled" else PHASES[1:]
            peaks = known.get(cell.key, {})
            predicted = {f"{phase}_predicted_bytes": peaks.get(phase) for phase in happens}
            table.add(*({**cell.row, "visit": visit, **row, **predicted} for row in rows))
            print(f"{cell}, visit {visit + 1} of {plan.visits}: {told(rows[-1])}", flush=True)
            if not bench.is_sound():
                print("the device no longer answers this process; the same command goes on from here", flush=True)
                return EXIT_TIME
    table.finish()
    return EXIT_VERDICT if any(row["status"] == "error" for row in table.rows) else 0


def expected(rows: list[dict[str, str]], cell: Cell, stated: float) -> float:
    """Seconds that a visit to `cell` may take: by the longest to one of the same shape and lengths, else `stated`."""
    alike = {name: str(value) for name, value in cell.row.items() if name != "way"}
    known = [float(row["visit_seconds"]) for row in rows if all(row[name] == value for name, value in alike.items())]
    return SLOWER * max(known) if known else stated


def told(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['status']} {row['error']}"
    seconds = ", ".join(f"{phase} {row[f'{phase}_seconds']:.3f}" for phase in PHASES)
    peaks = [row[f"{phase}_allocated_bytes"] or row[f"{phase}_resident_bytes"] for phase in PHASES]
    return f"{seconds} s, peak {max(peaks) / GIB:.2f} GiB, visit {row['visit_seconds']:.0f} s"


class Bench:
    """Where cells are visited: the tokenizer and prompts that all of them have, and the device."""

    def __init__(self, device: str, kernels: bool):
        self.device, self.kernels = device, kernels
        self.documents = data.load_documents("builtin")
        self.tokenizers, self.prompts = {}, {}

    def texts(self, cell: Cell):
        """(tokenizer, prompts) of a cell, made once."""
        if cell.vocab_size not in self.tokenizers:
            self.tokenizers[cell.vocab_size] = models.build_tokenizer(self.documents, cell.vocab_size)
        tokenizer, key = self.tokenizers[cell.vocab_size], (cell.vocab_size, cell.prompt_tokens)
        if key not in self.prompts:
            self.prompts[key] = data.build_prompts(self.documents, tokenizer, cell.prompt_tokens)[:1]
        return tokenizer, self.prompts[key]

    def visit(self, cell: Cell, steps: int) -> list[dict]:
        """One row a step after the warm-up, or a single one that says how it failed."""
        begun = time.monotonic()
        attention = ("kernels" if self.kernels and not cell.with_mask else "mask") if cell.shares else ""
        try:
            with switches(cell, attention == "mask"):
                rows = self.measure(cell, steps)
        except Exception as error:  # whatever a trainer or a kernel raises is the cell's outcome
            status = "oom" if is_out_of_memory(error) else "error"
            traceback.print_exc()
            rows = [{"status": status, "error": models.typed_line(error), "step": 0}]
        self.clear()
        seconds = round(time.monotonic() - begun, 2)
        return [{**row, "attention": attention, "visit_seconds": seconds} for row in rows]

    def measure(self, cell: Cell, steps: int) -> list[dict]:
        tokenizer, prompts = self.texts(cell)
        hf_config = cell.hf_config(tokenizer)
        with tempfile.TemporaryDirectory() as out, made_on(self.device, hf_config):
            trainer = build_trainer(cell.setup, Path(out), tokenizer, text_dataset(prompts), cell.model, steps + 1)
            rows = measure_steps(trainer, cell, tokenizer, Path(out), steps)
        return rows

    def clear(self) -> None:
        """Nothing of a trainer stays for the next one."""
        import torch

        gc.collect()
        if self.device == "cuda":
            with contextlib.suppress(RuntimeError):  # is_sound says so
                torch.cuda.empty_cache()

    def is_sound(self) -> bool:
        """Whether the device still answers; after an illegal access it does not, in this process."""
        import torch

        try:
            if self.device == "cuda":
                torch.ones(1, device="cuda").sum().item()
        except RuntimeError:
            return False
        return True


def measure_steps(trainer, cell: Cell, tokenizer, out: Path, steps: int) -> list[dict]:
    import torch
    from transformers import PrinterCallback

    from experiments.workload.trainers import torch_optimizer

    device = cell.setup.device
    trainer.remove_callback(PrinterCallback)
    phases = PhaseRecorder(out / "phases.csv", device)
    phases.attach(trainer.model, torch_optimizer(trainer))
    trainer._generate_single_turn = Completions(trainer, cell, tokenizer, phases).generate
    gc.collect()
    start = outside = None
    if device == "cuda":
        torch.cuda.empty_cache()
        start, outside = torch.cuda.memory_allocated(), level(device) - torch.cuda.memory_reserved()
    trainer.train()
    phases.close()
    if device == "cuda":  # CUDA loads a module when it is first called
        outside = max(outside, level(device) - torch.cuda.memory_reserved())
    rows = []
    for step in range(2, steps + 2):
        rows.append({"status": "ok", "step": step - 1, "start_allocated_bytes": start})
        for phase in PHASES:
            rows[-1] |= of_phase([peak for peak in phases.peaks if peak.step == step], phase, outside)
    return rows


def of_phase(peaks: list, phase: str, outside: int | None) -> dict:
    """Seconds and peaks of a phase in one step. What follows the optimizer (logs) belongs to none."""
    names = [peak.phase for peak in peaks]
    before = peaks[: names.index("optimizer") + 1] if "optimizer" in names else peaks
    mine = [peak for peak in before if peak.phase == phase]

    def largest(name: str) -> int | None:
        return max((value for peak in mine if (value := getattr(peak, name)) is not None), default=None)

    reserved = largest("peak_reserved_bytes")
    sizes = {
        "allocated": largest("peak_allocated_bytes"),
        "reserved": reserved,
        "device": None if reserved is None else reserved + outside,
        "resident": largest("peak_resident_bytes"),
    }
    seconds = round(sum(peak.end - peak.start for peak in mine), 5)
    return {f"{phase}_seconds": seconds} | {f"{phase}_{size}_bytes": value for size, value in sizes.items()}


class Completions:
    """In the place of the trainer's own generation: completions that are given, or sampled after a short warm-up."""

    def __init__(self, trainer, cell: Cell, tokenizer, phases: PhaseRecorder):
        self.trainer, self.cell, self.tokenizer, self.phases = trainer, cell, tokenizer, phases
        self.sample, self.number = trainer._generate_single_turn, 0

    def generate(self, prompt_ids, *more):
        self.number += 1
        if self.cell.completions == "sampled":
            if self.number > 1:
                return self.sample(prompt_ids, *more)
            settings = self.trainer.generation_config
            tokens = self.cell.completion_tokens
            if not self.cell.with_cudnn:  # which plans each number of keys when it first comes up
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
        if self.cell.completions != "ragged":
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
def switches(cell: Cell, mask: bool):
    """What a way to train switches on beside its settings: cuDNN's attention first, or attention with a mask where
    there are kernels without."""
    from trl.generation import shared_prefix_cache
    from trl.models import prefix_sharing_contexts

    with contextlib.ExitStack() as stack:
        if cell.with_cudnn:
            stack.enter_context(cudnn_first())
        for module in (prefix_sharing_contexts, shared_prefix_cache) if mask else ():
            stack.callback(setattr, module, "kernels_take", module.kernels_take)
            module.kernels_take = lambda key, value: False
        yield


def main(argv: list[str] | None = None) -> int:
    return exit_code("shape_cells", run, argv)


if __name__ == "__main__":
    sys.exit(main())
