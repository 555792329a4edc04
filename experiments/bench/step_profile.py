"""What a training step is made of, for stock and for prefix sharing where that loses most against it.

    python -m experiments.bench.step_profile [--device cuda]

Among the cells that the bench measured, the one is taken in which the fastest shared way needs most time beside the
fastest stock one, from scoring to the optimizer; where nothing was measured, the first. One step of each, after one
that warms up, with given completions, under torch's profiler. Writes the longest kernels and operators, how often they
ran and their own time, and the sums of all to results/<machine>/profile.csv.
"""

import sys
import time
from collections import defaultdict
from dataclasses import asdict, replace

from experiments.arms import ARMS
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import Cell, read_table
from experiments.bench.trainings import Trained
from experiments.builds import use_fork
from experiments.checks.exactness import profile_of
from experiments.measuring import FACTS, Parser, place
from experiments.record import write_csv
from rloo_memory.errors import exit_code

TIMED = ("score_seconds", "train_seconds", "optimizer_seconds")
OF_CELL = ("model", "prompt_tokens", "completion_tokens", "k")
COLUMNS = (*OF_CELL, "way", "kind", "name", "calls", "device_ms", "host_ms", *FACTS)
LONGEST = 40  # kernels, and as many operators


def worst(rows: list[dict[str, str]], device: str) -> tuple[Cell, str, str]:
    """The cell where sharing fares worst, with the fastest stock way and the fastest shared one, of bench.csv's
    rows."""
    seconds = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["measurement"].startswith("cells-") and row["metric"] in TIMED and not row["failure"]:
            seconds[tuple(row[name] for name in OF_CELL)][row["way"]] += float(row["median"])
    found = []
    for cell, ways in seconds.items():
        stock, shared = (
            sorted((time, way) for way, time in ways.items() if way.startswith(kind)) for kind in ("stock", "shared")
        )
        if stock and shared:
            found.append((shared[0][0] / stock[0][0], cell, stock[0][1], shared[0][1]))
    if not found:
        return MEASUREMENTS["cells-first" if device == "cuda" else "cells-small"].cells[0], "stock", "shared-2"
    _, (model, *sizes), *ways = max(found)
    return Cell(model, *map(int, sizes)), *ways


def profiled(trained: Trained, way: str):
    """torch's profiler after one step, from given completions to the end."""
    profiler = profile_of(trained.device)
    with trained.trainer(way, steps=2) as (trainer, phases, completions):

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
    here = place(Parser("bench.step_profile", __doc__).parse_args(argv), "peft")
    use_fork(ARMS["shared"])
    cell, *ways = worst(read_table(here.folder), here.device)
    shape, _, completions = cell.model.partition("/")
    cell = replace(cell, model=f"{shape}/{'ragged' if completions == 'ragged' else 'given'}")
    trained, table = Trained(cell, tuple(ways), here), []
    for way in ways:
        begun, profiler = time.monotonic(), profiled(trained, way)
        rows = rows_of(profiler)
        told = f"{len(profiler.events())} events, {time.monotonic() - begun:.0f} s"
        print(f"{way}: {told} from making the trainer to reading them", flush=True)
        del profiler
        trained.clear()
        table += [{**asdict(cell), "way": way, **row, **here.facts} for row in rows]
        write_csv(here.folder / "profile.csv", COLUMNS, table)
        for row in rows[:6]:
            print(f"{way} {row['kind']} {row['name'][:60]}: {row['calls']} x, {row['device_ms']} ms", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code("step_profile", run, argv)


if __name__ == "__main__":
    sys.exit(main())
