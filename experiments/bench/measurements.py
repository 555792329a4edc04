"""The list of measurements: what is measured, in which ways and how often."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from experiments.bench import random_models, trainings
from experiments.bench.group import PHASES, Group, Timed
from experiments.bench.lengths import Lengths
from experiments.bench.rivals import RIVALS, Rivals
from experiments.bench.samples import Cell
from experiments.measuring import Place


@dataclass(frozen=True)
class Measurement:
    """`start(cell, ways, place)` gives an object whose `sample(way)` is one repeat of one way: numbers by metric. The
    last word of a metric is its unit: seconds, bytes. What it raises is the outcome of that way. `models` are the
    names that a cell's model may have, `device` where alone it can run. No name of a way has a comma in it."""

    about: str
    start: Callable[[Cell, tuple[str, ...], Place], object]
    ways: tuple[str, ...]
    cells: tuple[Cell, ...]
    models: tuple[str, ...]
    repeats: int = 3
    repeats_near: int = 5  # of ways that take about as long as another
    device: str | None = "cpu"


def start(cell: Cell, ways: tuple[str, ...], here: Place, kind=Group, phases=PHASES, **more):
    return Timed(partial(random_models.group, cell, kind), ways, phases, **more)


def cells(names: str, *sizes: tuple[int, int, int]) -> tuple[Cell, ...]:
    """Each of the sizes (prompt, completion, k) with each of the models, which have spaces between."""
    return tuple(Cell(name, *size) for size, name in product(sizes, names.split()))


DENSE = ("narrow", "wide", "tiny")
KINDS = "bench windows sinks experts gated-deltanet images"
WHOLE_OR_SHARED = ("whole", "shared", "shared-micro-2")
MEASUREMENTS = {
    "worth": Measurement(
        "seconds of each phase over prompts and completions of many lengths",
        partial(start, generating=("whole", "shared")), WHOLE_OR_SHARED,  # passes differ behind generation alone
        cells("wide", (3000, 100, 8)) + cells("narrow wide", (200, 100, 8))
        + cells("narrow", (200, 1000, 8), (1000, 1000, 8)), DENSE,
    ),
    "decoding": Measurement(
        "seconds of generation: rows with a cache of their own, and one cache that holds the prompt once",
        partial(start, phases=("generate",)), ("whole", "shared"),
        cells("narrow wide", (20, 100, 8), (100, 100, 2), (100, 100, 8))
        + cells("wide", (100, 64, 32), (100, 512, 8), (2000, 256, 8)), DENSE,
    ),
    "rivals": Measurement(
        "scoring and training of one group, whole rows beside other ways to share the prompt",
        partial(start, kind=Rivals, phases=("score", "train"), peaks=True), RIVALS,
        cells("bench", (3000, 100, 8), (16, 512, 2)), ("bench", "tiny"),
    ),
    "lengths": Measurement(
        "scoring and training of one group whose completions differ in length, and of one whose do not",
        Lengths, ("whole", "whole-2", "whole-micro-2", "shared", "shared-micro-2"),
        cells("narrow/spread narrow/even wide/spread", (200, 325, 8)),
        ("wide/spread", "wide/even", "narrow/spread", "narrow/even", "tiny/spread", "tiny/even"),
    ),
    "alike": Measurement(
        "trainings on four prompts that begin alike: each computed once, and what they begin with once",
        trainings.Alike, trainings.ALIKE_WAYS,
        tuple(Cell(f"qwen3-8-layers/{n}", n + own, 100, 4) for n, own in ((2000, 200), (300, 100))),
        trainings.ALIKE_MODELS, repeats_near=3, device=None,  # the optimizer takes as long in each way
    ),
    "families": Measurement(
        "each phase on models of every kind: plain, windows, sinks, experts, recurrent layers, images",
        partial(start, peaks=True), ("whole", "shared-micro-2"),
        cells(KINDS, (3000, 100, 8)), (*KINDS.split(), "tiny"),
    ),
    "cells-gpu": Measurement(
        "trainings of real shapes, their seconds and peaks; run_gpu.sh lists which",
        trainings.Trained, trainings.WAYS, cells("qwen3-0.6b/sampled", (3000, 100, 8)), trainings.MODELS,
        repeats_near=3, device="cuda",
    ),
    "cells-small": Measurement(
        "the same, small: a trial", trainings.Trained, trainings.WAYS,
        cells("tiny-qwen3/sampled tiny-qwen3/ragged tiny-qwen3-lora/given", (48, 8, 4)), trainings.MODELS,
        repeats=1, repeats_near=1, device=None,
    ),
}  # fmt: skip
