"""Makes docs/fit.json, what docs/fit.html answers from: curves of every model, of what is trained, of every arm.

    python -m experiments.fitting.fit_data [--models qwen3-8b,gemma-3-4b-it] [--processes 2]
    python -m experiments.fitting.fit_data --facts [--models ...]

A part is one arm of one model. Finished parts are kept in .build/fit, so the same command goes on where it was
interrupted, also after the code has changed: remove the folder to begin anew, as `make fit-data` does at its end. The
file is written when all parts are there, and not if one is further from its simulations than `MOST_ERROR`. --facts
makes anew what is in the file and needs no simulation: the models' sizes, the reserve, what sharding does; with
--models, of these, and takes the others out.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.config import ROOT
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.plan.accuracy import reserve
from rloo_memory.plan.options import quiet
from rloo_memory.plan.setups import Setup

PARTS, PAGE = ROOT / ".build" / "fit", ROOT / "docs" / "fit.json"
MOST_ERROR = 0.02  # of a phase's peak
# Names on the hub, in the page's order; each is a shape of `rloo_memory.shapes`
MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3", "google/gemma-3-4b-it", "openai/gpt-oss-20b", "HuggingFaceTB/SmolLM3-3B",
)  # fmt: skip
# What is trained: what the page calls it, and the setup on one card
TRAINED = {
    "all": ("all weights, float32", Setup(prompt_tokens=1)),
    "lora": ("LoRA, rank 16", Setup(prompt_tokens=1, lora_rank=16)),
    "lora-4-bits": ("LoRA, rank 16, on 4 bits", Setup(prompt_tokens=1, lora_rank=16, weight_bits=4)),
}
ON_ONE_CARD = ("lora-4-bits",)  # quantized weights have no formula on several


def on_cards(setup: Setup, number: int) -> Setup:
    """With FSDP2 on several: weights are read in bfloat16, and shards of trained ones are float32, see `sharding`."""
    return setup if number == 1 else replace(setup, num_devices=number, fully_sharded=True, dtype="bfloat16")


def differs(trained: str, arm: str) -> bool:
    """Whether several cards compute something else than one, each: in bfloat16 weights, or a whole group."""
    return trained not in ON_ONE_CARD and (trained == "all" or arm == "shared")


@dataclass(frozen=True)
class Part:
    model: str  # its name on the hub
    trained: str
    arm: str
    several: bool = False  # cards

    @property
    def setup(self) -> Setup:
        return on_cards(TRAINED[self.trained][1], 1 + self.several)

    @property
    def path(self) -> Path:
        several = "_several" * self.several
        return PARTS / f"{self.model.replace('/', '--')}_{self.trained}_{self.arm}{several}.json"

    def __str__(self) -> str:
        return f"{self.model}, {TRAINED[self.trained][0]}, {self.arm}{', several cards' * self.several}"


def parts_of(model: str, several: bool | None = None) -> list[Part]:
    """Of one card, of several, or both."""
    from experiments.fitting.fit_curves import ARMS as arms

    one = [Part(model, trained, arm) for trained in TRAINED for arm in arms]
    more = [replace(part, several=True) for part in one if differs(part.trained, part.arm)]
    return one + more if several is None else more if several else one


def window_of(hf_config) -> int | None:
    """Tokens that a layer of a model sees, where some layers do not see all."""
    text_config = hf_config.get_text_config()
    slides = "sliding_attention" in (getattr(text_config, "layer_types", None) or ())
    return text_config.sliding_window if slides else None


def make(part: Part) -> tuple[Part, float]:
    """Writes the file of a part. Returns it and the error of its curves."""
    from experiments.fitting import fit_curves
    from rloo_memory.models import named_config

    with quiet():
        hf_config = named_config(part.model)
        curves = fit_curves.curves_of(part.setup, hf_config, part.arm, window_of(hf_config))
    phases = {phase: [asdict(regime) for regime in regimes] for phase, regimes in curves.phases.items()}
    PARTS.mkdir(parents=True, exist_ok=True)
    unfinished = part.path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"error": curves.error, "phases": phases}))
    unfinished.replace(part.path)
    return part, curves.error


def finished(part: Part) -> dict | None:
    """What the file of a part holds; None where there is none."""
    try:
        found = json.loads(part.path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def make_all(parts: list[Part], processes: int) -> None:
    """Makes the parts that are not there, and says how far it is."""
    missing = [part for part in parts if finished(part) is None]
    anew = f"; remove {PARTS} to make them anew" if len(missing) < len(parts) else ""
    print(f"{len(parts) - len(missing)} of {len(parts)} parts are there{anew}", flush=True)
    if not missing:
        return
    for number, ((part, error), left) in enumerate(in_processes(make, missing, processes), 1):
        done = len(parts) - len(missing) + number
        off = f"{error:.2%} off its simulations at most"
        print(f"{done} of {len(parts)}: {part}: {off}; about {left:.0f} min left", flush=True)


def in_processes(function, tasks: list, processes: int) -> Iterator[tuple[Any, float]]:
    """What `function` returns of each task, in the order of their ends, and the minutes that the others will take.
    Where this process is interrupted, the others end. Raises `ConfigError` where the system ended one of them."""
    import trl.trainer.rloo_trainer  # noqa: F401  once, not in each process

    start = time.monotonic()
    with multiprocessing.get_context("fork").Pool(processes, alone) as pool:
        workers = {process.pid for process in multiprocessing.active_children()}
        results = pool.imap_unordered(function, tasks)
        for number in range(1, len(tasks) + 1):
            while True:
                try:
                    result = results.next(timeout=2)
                    break
                except multiprocessing.TimeoutError:  # the pool replaces a process, but not what it had begun
                    if workers != {process.pid for process in multiprocessing.active_children()}:
                        raise ConfigError(
                            f"the system ended one of {processes} processes, most likely for its memory; what is "
                            "finished is kept: run the same command with a smaller --processes"
                        ) from None
            yield result, (time.monotonic() - start) / number * (len(tasks) - number) / 60


def alone() -> None:
    """Of several processes: each computes on one core, and is ended by the first one, not by Ctrl-C."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def facts() -> dict:
    """What the file holds of all models, but for what the simulations were of."""
    from rloo_memory.plan.scale_up.sharding import SHARDED, widened

    return {
        "reserve_bytes": reserve.OUTSIDE,
        "fragments": reserve.FIXED,
        "stays": reserve.STAYS,
        "trained": {
            name: {
                "called": called,
                "one_card": name in ON_ONE_CARD,
                # Times as large as simulated a shard is
                "widened": {kind: widened(on_cards(setup, 2), kind) for kind in (*SHARDED, "activations")},
            }
            for name, (called, setup) in TRAINED.items()
        },
    }


def facts_of(name: str) -> dict:
    """What it holds of a model, but for its curves. `gathered`: bytes by kind that FSDP2 gathers in a phase, on any
    number of cards."""
    from rloo_memory.models import meta_model, named_config
    from rloo_memory.plan.scale_up.sharding import spread, weights_by_place
    from rloo_memory.plan.simulation.simulate import PHASES

    hf_config = named_config(name)
    text_config, weights = hf_config.get_text_config(), weights_by_place(hf_config)
    sharded = {key: on_cards(setup, 2) for key, (_, setup) in TRAINED.items() if key not in ON_ONE_CARD}
    gathered = {
        trained: {phase: spread(setup, weights, 0, phase, {}) for phase in PHASES}
        for trained, setup in sharded.items()
    }
    experts = (getattr(text_config, each, None) for each in ("num_experts", "num_local_experts"))
    return {
        "name": name,
        "weights": sum(p.numel() for p in meta_model(hf_config).parameters()),
        "gathered": {
            trained: {phase: {kind: size for kind, size in kinds.items() if size} for phase, kinds in phases.items()}
            for trained, phases in gathered.items()
        },
        "vocabulary": text_config.vocab_size,
        "positions": text_config.max_position_embeddings,
        "window": window_of(hf_config),
        "experts": next(filter(None, experts), None),
    }


def page_data(models: tuple[str, ...]) -> dict:
    """What the file holds: bytes a term by kind (`fit_terms.terms`) of stretches, by model, trained, arm, phase. Those
    of "several" cards, where they differ, before they are divided."""
    import torch
    import transformers

    import trl
    from experiments.fitting import fit_terms

    def curves(name: str, several: bool) -> dict:
        found: dict[str, dict] = {}
        for part in parts_of(name, several):
            found.setdefault(part.trained, {})[part.arm] = finished(part)["phases"]
        return found

    return {
        "versions": f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        "first_room": fit_terms.FIRST_ROOM,
        "together": fit_terms.TOGETHER,
        "least": fit_terms.LEAST,
        "most": fit_terms.MOST,
        **facts(),
        "models": [
            {**facts_of(name), "trained": curves(name, several=False), "several": curves(name, several=True)}
            for name in models
        ],
    }


def refreshed(data: dict, names: tuple[str, ...]) -> dict:
    """The same data of these models with the facts of now. Raises `ConfigError` where something else was simulated."""
    if data["trained"].keys() != TRAINED.keys():
        raise ConfigError(f"{PAGE} is of {', '.join(data['trained'])}, not {', '.join(TRAINED)}: run make fit-data")
    kept = ("versions", "first_room", "together", "least", "most", "compared")
    models = [
        facts_of(model["name"]) | {name: model[name] for name in ("trained", "several")}
        for model in data["models"]
        if model["name"] in names
    ]
    return {name: data[name] for name in kept if name in data} | facts() | {"models": models}


def write(data: dict) -> None:
    PAGE.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"{PAGE.relative_to(ROOT)}: {len(data['models'])} models, {PAGE.stat().st_size / 1e6:.1f} MB")


def run(args: argparse.Namespace) -> int:
    models = MODELS
    if args.models is not None:
        short = {name.rsplit("/", 1)[-1].lower(): name for name in MODELS}
        named = [name.strip().rsplit("/", 1)[-1].lower() for name in args.models.split(",")]
        if unknown := [name for name in named if name not in short]:
            raise ConfigError(f"--models {unknown[0]!r} is not on the page; it has {', '.join(short)}")
        models = tuple(name for key, name in short.items() if key in named)
    if args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}; it must be at least 1")
    if args.facts and not PAGE.exists():
        raise ConfigError(f"{PAGE} is missing: --facts changes one that is there; run make fit-data")
    use_fork(ARMS["shared"])
    if args.facts:
        write(refreshed(json.loads(PAGE.read_text()), models))
        return 0
    parts = [part for model in models for part in parts_of(model)]
    try:
        make_all(parts, args.processes)
    except KeyboardInterrupt:
        there = sum(finished(part) is not None for part in parts)
        print(f"interrupted with {there} of {len(parts)} parts; the same command goes on", file=sys.stderr)
        return 130
    far = [f"{part}: {error:.1%}" for part in parts if (error := finished(part)["error"]) > MOST_ERROR]
    if far:
        raise ConfigError(f"not written: further than {MOST_ERROR:.0%} from their simulations are {'; '.join(far)}")
    if models != MODELS:
        print(f"these parts are there; {PAGE.relative_to(ROOT)} is written when all models are asked for")
        return 0
    write(page_data(models))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fitting.fit_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", help="only these, to try; default: all, and the file is written")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--facts", action="store_true", help="only what needs no simulation, in the file that is there"
    )
    return exit_code("fit_data", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
