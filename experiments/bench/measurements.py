"""The list of measurements: what is measured, in which ways and how often."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from experiments.bench import allocators, attention, random_models, sampling, trainings
from experiments.bench.group import PHASES, WAYS, Group, Timed
from experiments.bench.rivals import RIVALS, Rivals
from experiments.bench.samples import Cell
from experiments.bench.work import LIMITED, limit
from experiments.measuring import Place


@dataclass(frozen=True)
class Measurement:
    """`start(cell, ways, place)` gives an object whose `sample(way)` is one repeat of one way: numbers by metric. The
    last word of a metric is its unit: seconds, ms, bytes. What it raises is the outcome of that way. `models` are the
    names that a cell's model may have, `device` where alone it can run, `seconds` about what the first cell takes."""

    about: str
    start: Callable[[Cell, tuple[str, ...], Place], object]
    ways: tuple[str, ...]
    cells: tuple[Cell, ...]
    models: tuple[str, ...]
    repeats: int = 3
    repeats_near: int = 5  # of ways that take about as long as another
    device: str | None = None
    seconds: float = 60.0


def start(cell: Cell, ways: tuple[str, ...], here: Place, group=Group, phases=PHASES, peaks=False) -> Timed:
    model, vocab_size, image = random_models.build(cell)
    return Timed(group(model, vocab_size, cell, image), ways, phases, peaks)


class Worth(Timed):
    """Seconds, and beside those of whole rows the limit of any exact method for scoring and training."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        model, vocab_size, _ = random_models.build(cell)
        super().__init__(Group(model, vocab_size, cell), ways, PHASES, peaks=False)
        config = random_models.config_of(cell.model)
        self.limits = {f"{phase}_limit": round(limit(config, cell, phase), 3) for phase in LIMITED}

    def phases_of(self, way: str) -> tuple[str, ...]:
        """Ways that differ in their passes alone generate alike, so only `shared` does."""
        return PHASES if WAYS[way].pass_rows is None else PHASES[1:]

    def sample(self, way: str) -> dict[str, float]:
        return super().sample(way) | (self.limits if way == "whole" else {})


def cells(names: str, *sizes: tuple[int | None, ...]) -> tuple[Cell, ...]:
    """Each of the sizes (prompt, completion, k) with each of the models, which have spaces between."""
    return tuple(Cell(name, *size) for size, name in product(sizes, names.split()))


def of_trainings(
    about: str, planned: tuple[Cell, ...], ways=trainings.WAYS[:8], device="cuda", repeats=3, **more
) -> Measurement:
    """No more repeats of any: minutes on a GPU are dear."""
    names = tuple(f"{shape}/{kind}" for shape in trainings.SHAPES for kind in trainings.COMPLETIONS)
    return Measurement(
        about, trainings.Trained, ways, planned, names, repeats, repeats_near=repeats, device=device, **more
    )


DENSE = ("narrow", "wide", "tiny")
SHORT, LONG = (3000, 100), (1000, 2000)  # prompt, completion; 2,000 tokens take a minute to sample, so they are given
BESIDE = ("stock", "stock-cudnn", "shared-2", "shared-8192")
MEASUREMENTS = {
    "worth": Measurement(
        "seconds of each phase over prompts and completions of many lengths, beside the limit",
        Worth, tuple(WAYS),
        cells("narrow wide", *((p, c, 8) for p in (3000, 1000, 200) for c in (100, 1000))), DENSE, device="cpu",
    ),
    "decoding": Measurement(
        "seconds of generation: rows with a cache of their own, and one cache that holds the prompt once",
        partial(start, phases=("generate",)), ("whole", "shared"),
        cells("narrow wide", (20, 100, 8), (100, 100, 2), (100, 100, 8))
        + cells("wide", (100, 64, 32), (100, 2048, 8), (2000, 256, 8), (2000, 256, 32), (8000, 64, 8)),
        DENSE, device="cpu",
    ),
    "rivals": Measurement(
        "scoring and training of one group, whole rows beside other ways to share the prompt",
        partial(start, group=Rivals, phases=("score", "train"), peaks=True), RIVALS,
        cells("bench", (3000, 100, 8), (1000, 200, 8), (16, 512, 2)), ("bench", "tiny"), device="cpu",
    ),
    "families": Measurement(
        "each phase on models with recurrent layers and on one that sees images",
        partial(start, peaks=True), tuple(WAYS),
        cells("gated-deltanet mamba-2", (3000, 100, 8)) + cells("images", (random_models.IMAGE_TOKENS + 200, 100, 8)),
        ("gated-deltanet", "mamba-2", "images", "tiny"), device="cpu",
    ),
    "allocators": Measurement(
        "resident memory and time of one training with each host allocator",
        allocators.Trained, tuple(allocators.ALLOCATORS), (Cell("bench"),), ("bench",), device="cpu",
    ),
    "sampler": Measurement(
        "what sampling alone would have missed of a run's peak",
        sampling.Sampled, tuple(sampling.INTERVALS), cells("cpu", (None, None, 4)), ("seed", "cpu", "test"),
    ),
    "attention": Measurement(
        "milliseconds of one layer's attention",
        attention.Layer, attention.WAYS,
        cells("16/8-heads-of-128 32/8-heads-of-128", (3000, 100, 8), (1000, 2000, 8)), tuple(attention.HEADS),
    ),
    "cells-first": of_trainings(
        "every way to train, real shapes", cells("qwen3-0.6b/sampled", (*SHORT, 8)), seconds=200
    ),
    "cells-k8": of_trainings(
        "every way, k = 8",
        cells("qwen3-8b-lora/sampled", (*SHORT, 8)) + cells("qwen3-0.6b/given qwen3-8b-lora/given", (*LONG, 8)),
        repeats=2, seconds=300,
    ),
    "cells-ragged": of_trainings(
        "completions of different lengths",
        cells("qwen3-0.6b/ragged qwen3-8b-lora/ragged", (*SHORT, 8), (*LONG, 8)), BESIDE, repeats=2, seconds=150,
    ),
    "cells-k32": of_trainings(
        "every way, k = 32",
        cells("qwen3-0.6b/sampled qwen3-8b-lora/sampled", (*SHORT, 32))
        + cells("qwen3-0.6b/given qwen3-8b-lora/given", (*LONG, 32)),
        repeats=1, seconds=400,
    ),
    "cells-offload": of_trainings(
        "attention with a mask; activations on the host",
        cells("qwen3-0.6b/given qwen3-8b-lora/given", (*SHORT, 8), (*LONG, 8)),
        ("shared-2-mask", "stock-offload", "shared-2-offload"), repeats=1, seconds=150,
    ),
    "cells-long": of_trainings(
        "2,000 tokens sampled",
        cells("qwen3-0.6b/sampled qwen3-8b-lora/sampled", (*LONG, 8)), ("shared-8192", "stock"), repeats=1,
        seconds=400,
    ),
    "cells-8000": of_trainings(
        "prompts of 8,000",
        cells("qwen3-0.6b/sampled qwen3-1.7b/sampled qwen3-8b-lora/sampled", (8000, 100, 8), (8000, 512, 8)),
        ("shared-2", "shared-micro-2", "stock", "stock-accumulate"), repeats=1, seconds=300,
    ),
    "cells-small": of_trainings(
        "every way, small, on a CPU: a trial",
        cells("tiny-qwen3/sampled tiny-qwen3/ragged tiny-qwen3-lora/given", (48, 8, 4)), trainings.WAYS[:1]
        + trainings.WAYS[2:9], device=None, repeats=1,
    ),
}  # fmt: skip
