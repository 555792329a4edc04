"""What can be run: arms, scales, and the one frozen configuration that describes a run completely."""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from experiments.arms import ARMS
from rloo_memory.errors import ConfigError, choose, shown
from rloo_memory.sizes import GIB

ROOT = Path(__file__).resolve().parent.parent


USUAL = dict(
    shape="tiny-qwen3", steps=2, epochs=3, learning_rate=3e-6, temperature=0.7,
    precision="float32", reward="model", freed_memory="returned", interval=0.05, prompts=1,
)  # fmt: skip
BENCH = dict(
    shape="qwen3-8-layers", vocab_size=32_000, prompt_tokens=3000, completion_tokens=100, budget_bytes=12 * GIB,
    steps=1, epochs=1, temperature=1.0, reward="letters",
)  # fmt: skip
SMALL = dict(vocab_size=512, prompt_tokens=64, completion_tokens=8, budget_bytes=4 * GIB)
CUT = dict(vocab_size=151_936 // 8, prompt_tokens=3000, completion_tokens=100, budget_bytes=4 * GIB)
# Workloads: what each has instead of `USUAL`; `prompts` are those of a batch. `seed` is the published one. `cpu` keeps
# its token counts and divides vocabulary and budget by 8, so that the same cells run out of memory on two cores and a
# few GiB. `short` has nothing to cut. `exact` is `cpu` in float64, to compare two trainers' losses at full length
# beyond float32's rounding. `learn` is there to compare training curves, in float64 because Adam turns the rounding
# noise of a gradient that should be zero into steps, and one sampled token that differs makes two runs part. `bench`
# is large enough that a step's time is the model's, and `bench-time` is the same with malloc as it is: making resident
# memory mean "alive" takes time, and not the same share for every arm. Its second step is without
# what happens once.
SCALES = {
    "seed": CUT | dict(vocab_size=151_936, budget_bytes=32 * GIB, steps=10, precision="bf16"),
    "cpu": CUT | dict(steps=1),
    "short": CUT | dict(prompt_tokens=512, steps=1),
    "exact": CUT | dict(budget_bytes=8 * GIB, precision="float64"),
    "learn": SMALL | dict(
        prompt_tokens=48, steps=30, epochs=1, prompts=12, learning_rate=5e-2, temperature=1.0, reward="letters",
        precision="float64",
    ),
    "test": SMALL,
    "bench": BENCH,
    "bench-time": BENCH | dict(freed_memory="kept", steps=2),
}  # fmt: skip


def option(about: str, *, low: float | None = None, high: float | None = None, choices=None):
    """A field of `RunConfig` that is an option of the command line: what its help says, and what may be given. The
    highest values are beyond any machine: they catch slips of the keyboard."""
    return field(metadata=dict(about=about, low=low, high=high, choices=choices))


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does, each field an option of `experiments.train`. Two runs with equal
    configurations and commits are the same run."""

    arm: str = option("the trainer", choices=ARMS)
    scale: str = option("the workload; default: seed on CUDA, cpu elsewhere", choices=SCALES)
    k: int = option("completions per prompt", low=2, high=4096)  # leave-one-out needs another completion
    batch: int = option("completions per batch; default: those of the scale's prompts", low=1, high=2**16)
    repeat: int = option("number of the repeat, 0 by default", low=0, high=9999)
    seed: int = option("default: 42 + repeat", low=0, high=2**32 - 1)  # as NumPy takes them
    shape: str = option("of the model that is built here, with random weights")
    vocab_size: int = option("of the model that is built here", low=260, high=2**24)  # 256 bytes, 4 special tokens
    prompt_tokens: int = option("of each prompt, chat template included", low=16, high=2**24)
    completion_tokens: int = option("of each completion", low=1, high=2**24)
    budget_bytes: int = option("memory that torch may allocate, such as 4GiB", low=1, high=2**50)
    steps: int = option("rollouts", low=1, high=10**7)
    epochs: int = option("over each rollout", low=1, high=10**4)
    learning_rate: float = option("of Adam", low=0, high=100)
    temperature: float = option("of sampling", low=0.01, high=100)
    precision: str = option("bf16 is mixed", choices=("float64", "float32", "bf16"))
    reward: str = option("a model, or the letters e", choices=("model", "letters"))
    freed_memory: str = option("on the CPU: to the system, or as malloc likes", choices=("returned", "kept"))
    device: str = option("cpu or cuda")
    interval: float = option("of the memory sampler, in seconds", low=0.01, high=1)
    threads: int = option("of torch on the CPU; default: one a core", low=1, high=1024)
    completions_per_forward: int = option(
        "arms with prefix sharing: how many go together; default 2", low=1, high=2**16
    )

    @property
    def run_id(self) -> str:
        usual = ARMS[self.arm].completions_per_forward(self.batch)
        passes = "" if self.completions_per_forward == usual else f"_c{self.completions_per_forward}"
        return f"{self.arm}_{self.scale}_k{self.k}{passes}_r{self.repeat}"


def resolve(arm: str, k: int, scale: str | None, device: str, repeat: int = 0, **overrides) -> RunConfig:
    """Fill in a run's configuration from its scale, None: the device's own. `overrides` that are None are left to it.

    Raises `ConfigError` for a value outside its limits, an unknown name, and a combination that cannot run. Loads
    nothing.
    """
    choose("arm", arm, ARMS)
    scale = scale or ("seed" if device == "cuda" else "cpu")
    given = {name: value for name, value in overrides.items() if value is not None}
    values = USUAL | SCALES[scale] | dict(arm=arm, k=k, scale=scale, device=device, repeat=repeat)
    values |= dict(seed=42 + repeat, threads=os.cpu_count() or 1, batch=k * values.pop("prompts")) | given
    values.setdefault("completions_per_forward", ARMS[arm].completions_per_forward(values["batch"]))
    config = RunConfig(**values)
    check(config)
    return config


def check(config: RunConfig) -> None:
    for declared in fields(RunConfig):
        if declared.metadata["low"] is not None:
            value = getattr(config, declared.name)
            check_limit(option_name(declared.name), value, declared.metadata["low"], declared.metadata["high"])
    arm, k, rows = ARMS[config.arm], config.k, config.completions_per_forward
    if config.batch % k:
        raise ConfigError(
            f"batch {config.batch} is not divisible by k={k}: completions of a prompt would be split; "
            f"use --batch {k * max(1, round(config.batch / k))}"
        )
    if not arm.shares_prefix and rows != (usual := arm.completions_per_forward(config.batch)):
        sharing = ", ".join(name for name, other in ARMS.items() if other.shares_prefix)
        raise ConfigError(
            f"--completions-per-forward {rows}: {arm.name} always takes {usual}; leave the option out or use "
            f"--arm {sharing}"
        )
    if arm.shares_prefix and (rows > k or arm.accumulate and k % rows):
        fitting = max(fewer for fewer in range(1, min(rows, k + 1)) if k % fewer == 0 or not arm.accumulate)
        why = f"micro-batches of {arm.name} must divide k={k}" if rows <= k else f"it is above k={k}"
        raise ConfigError(f"--completions-per-forward {rows}: {why}; use {fitting}")


def option_name(field_name: str) -> str:
    return "--budget" if field_name == "budget_bytes" else f"--{field_name.replace('_', '-')}"


def check_limit(name: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` unless `value` lies within `low` to `high`. NaN never does."""
    if not low <= value <= high:
        option = f"--{name.removeprefix('--')}"
        raise ConfigError(
            f"{option} {shown(value)} must be at least {low} and at most {high}; use {option} "
            f"{high if value > high else low}, or a value in between"
        )
