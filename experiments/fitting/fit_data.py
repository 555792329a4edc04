"""Makes docs/fit.json, what docs/fit.html answers from: sums of every model, of what is trained, of every arm.

    python -m experiments.fitting.fit_data [--processes 2]

A part is one arm of one model. Finished parts are kept in .build/fit, so the same command of the same commit goes on
where it was interrupted. Nothing is written if a part is further from its simulations than `MOST_ERROR`.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

from tqdm import tqdm

from experiments.commit import is_same_code, source_commit
from experiments.config import ROOT
from experiments.fitting import sums
from experiments.processes import end_with
from experiments.run_options import Parser, whole
from rloo_memory.errors import ConfigError, program
from rloo_memory.installed_trl import versions_here
from rloo_memory.models import meta_model, named_config
from rloo_memory.plan.accuracy import reserve
from rloo_memory.plan.options import quiet
from rloo_memory.plan.scale_up.sharding import SHARDED, spread, weights_by_place, widened
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.simulate import PHASES
from rloo_memory.plan.smallest import on_cards

PARTS, PAGE = ROOT / ".build" / "fit" / source_commit(), ROOT / "docs" / "fit.json"
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
PAGE_ARMS = ("stock", "stock-accumulate", "shared")


@dataclass(frozen=True)
class Part:
    model: str  # its name on the hub
    trained: str
    arm: str
    several: bool = False  # cards

    @property
    def path(self):
        name = "_".join((self.model.replace("/", "--"), self.trained, self.arm, *["several"] * self.several))
        return PARTS / f"{name}.json"

    def read(self) -> dict:
        return json.loads(self.path.read_text())


def part_of(model: str, trained: str, arm: str, several: bool) -> Part:
    """The one that answers. On several cards, each computes something else than one: in bfloat16 where all weights are
    trained, and a whole group where its prompt is shared."""
    return Part(model, trained, arm, several and (trained == "all" or arm == "shared"))


def window_of(hf_config) -> int | None:
    """Tokens that a layer of a model sees, where some layers do not see all."""
    text_config = hf_config.get_text_config()
    slides = "sliding_attention" in (getattr(text_config, "layer_types", None) or ())
    return text_config.sliding_window if slides else None


def make(part: Part) -> None:
    """Writes the file of a part."""
    with quiet():
        hf_config = named_config(part.model)
        setup = on_cards(TRAINED[part.trained][1], 1 + part.several)
        phases, error = sums.sums_of(setup, hf_config, part.arm, window_of(hf_config))
    part.path.parent.mkdir(parents=True, exist_ok=True)
    part.path.write_text(json.dumps({"error": error, "phases": phases}))


def in_processes(function: Callable, tasks: list, processes: int) -> Iterator:
    """What `function` returns of each task, in their order, with a bar that says how long it takes."""
    import torch
    import trl.trainer.rloo_trainer  # noqa: F401  once, not in each process

    def begin(parent: int) -> None:
        end_with(parent)
        torch.set_num_threads(1)

    with ProcessPoolExecutor(processes, get_context("fork"), begin, (os.getpid(),)) as pool:
        yield from tqdm(pool.map(function, tasks), total=len(tasks))


def facts_of(name: str) -> dict:
    """What the file holds of a model, but for its sums. `gathered`: bytes by kind that FSDP2 gathers in a phase, on
    any number of cards."""
    hf_config = named_config(name)
    text_config, weights = hf_config.get_text_config(), weights_by_place(hf_config)

    def gathered(setup: Setup, phase: str) -> dict[str, int]:
        return {kind: size for kind, size in spread(on_cards(setup, 2), weights, 0, phase, {}).items() if size}

    experts = (getattr(text_config, each, None) for each in ("num_experts", "num_local_experts"))
    return {
        "name": name,
        "weights": sum(p.numel() for p in meta_model(hf_config).parameters()),
        "gathered": {
            trained: {phase: gathered(setup, phase) for phase in PHASES}
            for trained, (_, setup) in TRAINED.items()
            if trained not in ON_ONE_CARD
        },
        "vocabulary": text_config.vocab_size,
        "positions": text_config.max_position_embeddings,
        "window": window_of(hf_config),
        "experts": next(filter(None, experts), None),
    }


def sums_in_file(model: str, several: bool, terms: tuple[str, ...]) -> dict:
    def numbered(phases: dict) -> dict:
        return {
            phase: [
                {kind: {terms.index(term): size for term, size in sizes.items()} for kind, sizes in stretch.items()}
                for stretch in stretches
            ]
            for phase, stretches in phases.items()
        }

    return {
        trained: {arm: numbered(part_of(model, trained, arm, several).read()["phases"]) for arm in PAGE_ARMS}
        for trained in TRAINED
        if not (several and trained in ON_ONE_CARD)
    }


def page_data() -> dict:
    """What the file holds: bytes by kind and by number of a term of stretches, by model, what is trained, arm and
    phase. Those of "several" cards before they are divided; "widened": times as large as simulated a shard is."""
    terms = sums.all_terms()
    return {
        "versions": versions_here(),
        "terms": terms,
        "first_room": sums.FIRST_ROOM,
        "together": sums.TOGETHER,
        "least": sums.LEAST,
        "most": sums.MOST,
        "reserve_bytes": reserve.OUTSIDE,
        "fragments": reserve.FIXED,
        "stays": reserve.STAYS,
        "trained": {
            name: {
                "called": called,
                "one_card": name in ON_ONE_CARD,
                "widened": {kind: widened(on_cards(setup, 2), kind) for kind in (*SHARDED, "activations")},
            }
            for name, (called, setup) in TRAINED.items()
        },
        "models": [
            facts_of(name) | {key: sums_in_file(name, key == "several", terms) for key in ("trained", "several")}
            for name in MODELS
        ],
    }


def processes(module: str, doc: str, argv: list[str] | None) -> int:
    """How many a command line asks for."""
    parser = Parser(module, doc, place=False)
    parser.add_argument("--processes", type=whole, default=os.cpu_count() or 1)
    return parser.parse_args(argv).processes


@program("fit_data")
def main(argv: list[str] | None) -> int:
    number = processes("fitting.fit_data", __doc__, argv)
    if not is_same_code(PARTS.name, PARTS.name):
        shutil.rmtree(PARTS, ignore_errors=True)
    asked = product(MODELS, TRAINED, PAGE_ARMS, (False, True))
    answering = (part_of(*each) for each in asked if not (each[1] in ON_ONE_CARD and each[3]))
    parts = list(dict.fromkeys(answering))
    missing = [part for part in parts if not part.path.exists()]
    print(f"{len(parts) - len(missing)} of {len(parts)} parts are there", flush=True)
    list(in_processes(make, missing, number))
    far = [f"{part.path.name}: {error:.1%}" for part in parts if (error := part.read()["error"]) > MOST_ERROR]
    if far:
        raise ConfigError(f"not written: further than {MOST_ERROR:.0%} from their simulations are {'; '.join(far)}")
    PAGE.write_text(json.dumps(page_data(), separators=(",", ":")) + "\n")
    print(f"{PAGE.relative_to(ROOT)}: {len(MODELS)} models, {PAGE.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
