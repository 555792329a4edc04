"""What a training step is made of, for stock and for prefix sharing where that loses most against it.

    python -m experiments.evidence.gpu.step_profile [--device cuda]

Among the cells that `shape_cells` measured, the shape is taken at which the fastest shared way needs most time beside
the fastest stock one, from scoring to the optimizer; where nothing was measured, the first. One step of each, after
one that warms up, with given completions, under torch's profiler. Writes the longest kernels and operators, how often
they ran and their own time, and the sums of all to results/<machine>/profile.csv.
"""

import csv
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from experiments.builds import use_fork
from experiments.evidence.common import FACTS, Parser, Table, place
from experiments.evidence.exactness import profile_of
from experiments.evidence.gpu.kernels import are_right
from experiments.evidence.gpu.plans import PLANS, Cell
from experiments.evidence.gpu.shape_cells import OF_CELL, Bench, Completions, made_on, switches
from experiments.evidence.setup_trainer import build_trainer, text_dataset
from rloo_memory.arms import ARMS
from rloo_memory.errors import exit_code
from rloo_memory.phases import PhaseRecorder

TIMED = ("score", "train", "optimizer")
COLUMNS = (*OF_CELL, "kind", "name", "calls", "device_ms", "host_ms", *FACTS)
LONGEST = 40  # kernels, and as many operators


def measured(folder: Path) -> list[dict[str, str]]:
    """The finished steps of all cells in results/<machine>."""
    rows = []
    for path in sorted((folder / "cells").glob("*.csv*")):
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["status"] == "ok" and row["commit"]]
    return rows


def worst(rows: list[dict[str, str]], device: str) -> tuple[Cell, Cell]:
    """The fastest stock way and the fastest shared one, at the shape where their ratio is worst for sharing."""
    seconds = defaultdict(list)
    for row in rows:
        seconds[tuple(row[name] for name in OF_CELL)].append(sum(float(row[f"{phase}_seconds"]) for phase in TIMED))
    shapes = defaultdict(dict)
    for (*shape, way), times in seconds.items():
        shapes[tuple(shape)][way] = median(times)
    found = []
    for shape, ways in shapes.items():
        stock, shared = (
            sorted((time, way) for way, time in ways.items() if way.startswith(kind)) for kind in ("stock", "shared")
        )
        if stock and shared:
            found.append((shared[0][0] / stock[0][0], shape, stock[0][1], shared[0][1]))
    plan = PLANS["first" if device == "cuda" else "small"].cells
    if not found:
        return tuple(next(cell for cell in plan if cell.way == way) for way in ("stock", "shared-2"))
    _, shape, *ways = max(found)
    model, *numbers, completions = shape
    return tuple(replace(plan[0], **values(model, numbers, completions), way=way) for way in ways)


def values(model: str, numbers: list[str], completions: str) -> dict:
    names = OF_CELL[1 : 1 + len(numbers)]
    return {"model": model, "completions": completions} | dict(zip(names, map(int, numbers), strict=True))


def profiled(cell: Cell, bench: Bench):
    """torch's profiler after one step, from given completions to the end."""
    from experiments.workload.trainers import torch_optimizer

    profiler, (tokenizer, prompts) = profile_of(bench.device), bench.texts(cell)
    with tempfile.TemporaryDirectory() as out, made_on(bench.device, cell.hf_config(tokenizer)):
        trainer = build_trainer(cell.setup, Path(out), tokenizer, text_dataset(prompts), cell.model)
        phases = PhaseRecorder(Path(out) / "phases.csv", bench.device)
        phases.attach(trainer.model, torch_optimizer(trainer))
        completions = Completions(trainer, cell, tokenizer, phases)

        def generate(*inputs):
            ids = completions.generate(*inputs)
            if completions.number == 2:
                profiler.start()
            return ids

        trainer._generate_single_turn = generate
        trainer.train()
        profiler.stop()
        phases.close()
    return profiler


def rows_of(profiler) -> list[dict]:
    """The longest kernels and operators by their own time, and the sum of each kind."""
    kinds = defaultdict(list)
    for event in profiler.key_averages():
        on_device = event.device_type.name != "CPU"
        row = {"name": event.key[:120], "calls": event.count}
        row |= {"device_ms": event.self_device_time_total / 1000, "host_ms": event.self_cpu_time_total / 1000}
        kinds["kernel" if on_device else "operator"].append(row)
    rows = []
    for kind, mine in kinds.items():
        times = ("device_ms", "host_ms")
        whole = {name: sum(row[name] for row in mine) for name in ("calls", *times)}
        mine.sort(key=lambda row: -row["device_ms" if kind == "kernel" else "host_ms"])
        for row in [{"name": "all", **whole}, *mine[:LONGEST]]:
            rows.append({"kind": kind, **row, **{name: round(row[name], 3) for name in times}})
    return rows


def run(argv: list[str] | None) -> int:
    here = place(Parser("gpu.step_profile", __doc__).parse_args(argv), "peft")
    use_fork(ARMS["shared"])
    bench = Bench(here.device, are_right(here.folder, here.facts))
    table = Table(here.folder / "profile.csv", COLUMNS, here.facts, fresh=True)
    for cell in worst(measured(here.folder), here.device):
        cell = replace(cell, completions="ragged" if cell.completions == "ragged" else "given")
        with switches(cell, cell.shares and (cell.with_mask or not bench.kernels)):
            begun, profiler = time.monotonic(), profiled(cell, bench)
        rows = rows_of(profiler)
        told = f"{len(profiler.events())} events, {time.monotonic() - begun:.0f} s"
        print(f"{cell.way}: {told} from making the trainer to reading them", flush=True)
        del profiler
        bench.clear()
        table.add(*({**cell.row, **row} for row in rows))
        for row in rows[:6]:
            print(f"{cell.way} {row['kind']} {row['name'][:60]}: {row['calls']} x, {row['device_ms']} ms", flush=True)
    table.finish()
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code("step_profile", run, argv)


if __name__ == "__main__":
    sys.exit(main())
