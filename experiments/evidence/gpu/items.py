"""What a GPU is asked, in order of priority: what cannot be known without one comes first."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from experiments import config as cfg
from experiments.config import ROOT
from experiments.evidence.gpu.session import Item
from rloo_memory.commit import source_commit
from rloo_memory.run_record import FINISHED, read_record

CURRENT = "stock,stock-accumulate,shared"
# Those first that say most, should the time not do for all
PUBLISHED = (
    "shared", "classic-baseline", "classic-string", "classic-lean", "stock", "stock-accumulate", "classic-string-exact"
)  # fmt: skip
MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b-lora")
TOKENS = ("p3000-c100", "p3000-c512", "p1000-c100", "p1000-c512", "p8000-c100", "p8000-c512")
RUN_SECONDS = 45.0  # of one run of the suite, its process started; a guess


def suite(name: str, device: str, scale: str, arms: str, ks: str, repeats: int, seconds: float = RUN_SECONDS) -> Item:
    """Runs of experiments.suite, each a process of its own, as the published code was."""
    command = ("--device", device, "--scale", scale, "--arms", arms, "--k", ks, "--repeats", str(repeats))
    runs = len(arms.split(",")) * len(ks.split(",")) * repeats
    wanted = partial(has_all, device=device, scale=scale, arms=arms, ks=ks, repeats=repeats)
    return Item(name, ("experiments.suite", *command), runs * seconds, 1.5 * seconds, seconds, wanted)


def has_all(folder: Path, device: str, scale: str, arms: str, ks: str, repeats: int) -> bool:
    """Whether all runs of this code are finished in results/<machine>: the suite leaves some when its time is over."""
    commit = source_commit()
    for arm in arms.split(","):
        for k in map(int, ks.split(",")):
            for repeat in range(repeats):
                config = cfg.resolve(arm, k, scale, device, repeat)
                record = read_record(folder / config.run_id)
                if record is None or record["status"] not in FINISHED or record["commit"] != commit:
                    return False
                if record["config"] != config.as_dict():
                    return False
    return True


def measure(name: str, device: str, expected: float, module: str, *options: str, least: float | None = None) -> Item:
    return Item(name, (f"experiments.evidence.{module}", "--device", device, *options), expected, least)


def cells(plan: str, device: str, expected: float, least: float, predictions: Path) -> Item:
    options = ("--plan", plan, "--predictions", os.path.relpath(predictions, ROOT))  # the same wherever the project is
    return measure(f"cells-{plan}", device, expected, "gpu.shape_cells", *options, least=least)


def on_cuda(predictions: Path) -> list[Item]:
    """Seconds are guesses for an H200; those of a finished item are what it took. Of `exactness` and `profile` they
    hold 50 microseconds for each event that torch's profiler hands out."""
    published = ",".join(PUBLISHED)
    more = "classic-string,classic-string-exact,classic-lean,shared"
    quantized = () if find_spec("bitsandbytes") else ("--without-quantized",)
    return [
        measure("device", "cuda", 30, "gpu.device_facts"),
        measure("kernels", "cuda", 40, "gpu.kernels"),
        measure("exactness", "cuda", 220, "exactness"),
        measure("attention", "cuda", 40, "gpu.attention_speed"),
        cells("first", "cuda", 200, 50, predictions),
        cells("k8", "cuda", 260, 60, predictions),
        suite("published-k8", "cuda", "seed", published, "8", 1),
        cells("ragged", "cuda", 180, 60, predictions),
        cells("k32", "cuda", 420, 80, predictions),
        suite("published-k2-k4", "cuda", "seed", published, "2,4", 1),
        measure("profile", "cuda", 120, "gpu.step_profile"),
        cells("mask-offload", "cuda", 150, 50, predictions),
        measure("sampler", "cuda", 9 * RUN_SECONDS, "sampler_check", least=60),
        measure("planner", "cuda", 500, "planner_check", *quantized, least=60),
        cells("long-sampled", "cuda", 400, 160, predictions),
        suite("published-repeats", "cuda", "seed", published, "2,4,8", 3),
        suite("published-large-k", "cuda", "seed", more, "16,32,64", 1),
        *(
            suite(f"{model}-{tokens}", "cuda", f"{model}-{tokens}", CURRENT, "8,16,32", 1, seconds=60)
            for model in MODELS
            for tokens in TOKENS
        ),
    ]


def on_cpu(predictions: Path) -> list[Item]:
    """The same programs at small size: a trial of the way, whose figures are a CPU's."""
    sampler = ("--scale", "test", "--k", "2", "--intervals", "0.05", "--repeats", "1", "--threads", "1")
    return [
        measure("device", "cpu", 15, "gpu.device_facts"),
        measure("kernels", "cpu", 15, "gpu.kernels"),
        measure("exactness", "cpu", 60, "exactness"),
        measure("attention", "cpu", 15, "gpu.attention_speed"),
        cells("small", "cpu", 60, 20, predictions),
        suite("published-k2", "cpu", "test", "shared,classic-lean", "2", 1, seconds=20),
        measure("profile", "cpu", 20, "gpu.step_profile"),
        measure("sampler", "cpu", 20, "sampler_check", *sampler, least=10),
        measure("planner", "cpu", 40, "planner_check", "--cases", "shared-k8", least=20),
    ]
