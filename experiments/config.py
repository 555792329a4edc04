"""What can be run: arms, scales, and the one frozen configuration that describes a run completely."""

import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from experiments.arms import ARMS, Arm
from rloo_memory.errors import ConfigError, choose, shown
from rloo_memory.sizes import GIB

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Scale:
    """A workload. Token counts are per sequence, `budget_bytes` is what torch may allocate before "out of memory"."""

    name: str
    shape: str  # a name in shapes.SHAPES
    vocab_size: int
    prompt_tokens: int
    completion_tokens: int
    budget_bytes: int
    steps: int = 2  # rollouts, each trained on for `epochs` epochs
    epochs: int = 3
    prompts: int = 1  # in a batch, so the batch has k x prompts completions
    learning_rate: float = 3e-6
    temperature: float = 0.7
    # or "float64", or "bf16": mixed precision, TRL's own default, or "bfloat16": the weights as well
    precision: str = "float32"
    reward: str = "model"  # or "letters", see data.letter_reward
    lora_rank: int = 0  # 0 trains every weight
    freed_memory: str = "returned"  # on the CPU: to the system at once, or "kept" as malloc likes, for times


# `seed` is the published workload. `cpu` keeps its token counts and divides vocabulary and budget by 8, so that the
# same cells run out of memory on two cores and a few GiB. `short` has nothing to cut. `exact` is `cpu` in float64, to
# compare two trainers' losses at full length beyond float32's rounding. `learn` is there to compare training curves,
# in float64 because Adam turns the rounding noise of a gradient that should be zero into steps, and one sampled token
# that differs makes two runs part. `bench` is large enough that a step's time is the model's, and `bench-time` is the
# same with malloc as it is: making resident memory mean "alive" takes time, and not the same share for every arm.
SCALES = {
    scale.name: scale
    for scale in (
        Scale("seed", "tiny-qwen3", 151_936, 3000, 100, 32 * GIB, steps=10, precision="bf16"),
        Scale("cpu", "tiny-qwen3", 151_936 // 8, 3000, 100, 4 * GIB),
        Scale("short", "tiny-qwen3", 151_936 // 8, 512, 100, 4 * GIB),
        Scale("exact", "tiny-qwen3", 151_936 // 8, 3000, 100, 8 * GIB, precision="float64"),
        Scale(
            "learn", "tiny-qwen3", 512, 48, 8, 4 * GIB, steps=30, epochs=1, prompts=12, learning_rate=5e-2,
            temperature=1.0, reward="letters", precision="float64",
        ),
        Scale("test", "tiny-qwen3", 512, 64, 8, 4 * GIB),
        *(
            Scale(
                name, "qwen3-8-layers", 32_000, 3000, 100, 12 * GIB, steps=1, epochs=1, temperature=1.0,
                reward="letters", freed_memory=freed_memory,
            )
            for name, freed_memory in (("bench", "returned"), ("bench-time", "kept"))
        ),
        Scale(
            "test-lora", "tiny-qwen3", 512, 64, 8, 4 * GIB, steps=1, epochs=1, precision="bfloat16", reward="letters",
            lora_rank=4,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does. Two runs with equal configurations and commits are the same run."""

    arm: str
    scale: str
    k: int
    batch: int
    repeat: int
    seed: int
    shape: str
    model: str | None  # a local folder or `hub:owner/name`; None builds `shape` with random weights
    documents: str
    vocab_size: int
    prompt_tokens: int
    completion_tokens: int
    budget_bytes: int
    steps: int
    epochs: int
    learning_rate: float
    temperature: float
    precision: str
    reward: str
    lora_rank: int
    freed_memory: str
    device: str  # "cpu" or "cuda"
    interval: float  # of the memory sampler, in seconds
    threads: int
    completions_per_forward: int

    @property
    def run_id(self) -> str:
        usual = ARMS[self.arm].completions_per_forward(self.batch)
        passes = "" if self.completions_per_forward == usual else f"_c{self.completions_per_forward}"
        return f"{self.arm}_{self.scale}_k{self.k}{passes}_r{self.repeat}"

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values) -> "RunConfig":
        """The configuration that `as_dict` gave. Raises `ConfigError` for a missing or unknown field, one of another
        type, and whatever `check` refuses."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            wrong = set(values) ^ set(names) if isinstance(values, dict) else {"everything"}
            raise ConfigError(f"not a run's configuration ({', '.join(sorted(wrong))} missing or unknown)")
        for field in fields(cls):
            value = values[field.name]
            allowed = (int, float) if field.type is float else field.type
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise ConfigError(f"{field.name} is {shown(value)}, not {getattr(allowed, '__name__', allowed)}")
        config = cls(**values)
        check(config)
        return config


# The smallest and largest value of each number. The largest are beyond any machine: they catch slips of the keyboard.
LIMITS = {
    "k": (2, 4096),  # leave-one-out needs another completion
    "batch": (1, 2**16),
    "repeat": (0, 9999),
    "seed": (0, 2**32 - 1),  # as NumPy takes them
    "vocab_size": (260, 2**24),  # the tokenizer's 256 bytes and four special tokens
    "prompt_tokens": (16, 2**24),  # the chat template needs some
    "completion_tokens": (1, 2**24),
    "budget_bytes": (1, 2**50),
    "steps": (1, 10**7),
    "epochs": (1, 10**4),
    "learning_rate": (0, 100),
    "temperature": (0.01, 100),
    "lora_rank": (0, 2**16),
    "interval": (0.01, 1),  # of the memory sampler, in seconds
    "threads": (1, 1024),
}  # fmt: skip


def check_limit(name: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` unless `value` lies within `low` to `high`. NaN never does."""
    if not low <= value <= high:
        option = "--budget" if name == "budget_bytes" else f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{option} {shown(value)} must be at least {low} and at most {high}; use {option} "
            f"{high if value > high else low}, or a value in between"
        )


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a value outside its limits, an unknown name, a combination that cannot run, and a local
    file that is not there. Loads nothing."""
    choose("arm", config.arm, ARMS)
    choose("scale", config.scale, SCALES)
    choose("device", config.device, ("cpu", "cuda"))
    choose("precision", config.precision, ("float64", "float32", "bf16", "bfloat16"))
    choose("reward", config.reward, ("model", "letters"))
    choose("freed memory", config.freed_memory, ("returned", "kept"))
    for name, (low, high) in LIMITS.items():
        check_limit(name, getattr(config, name), low, high)
    arm, k = ARMS[config.arm], config.k
    if config.batch % k:
        raise ConfigError(
            f"batch {config.batch} is not divisible by k={k}: completions of a prompt would be split; "
            f"use --batch {k * max(1, round(config.batch / k))}"
        )
    if not arm.shares_prefix and config.completions_per_forward != arm.completions_per_forward(config.batch):
        raise not_for(arm, config)
    if arm.shares_prefix and not 1 <= config.completions_per_forward <= k:
        raise ConfigError(
            f"--completions-per-forward {shown(config.completions_per_forward)} is outside 1 to k={k}: completions of "
            f"one prompt go together; use {min(max(1, config.completions_per_forward), k)}"
        )
    if arm.shares_prefix and arm.accumulate and k % config.completions_per_forward:
        fitting = max(rows for rows in range(1, config.completions_per_forward) if k % rows == 0)
        given = f"--completions-per-forward {config.completions_per_forward}"
        raise ConfigError(f"{given}: micro-batches of {arm.name} must divide k={k}; use {fitting}")
    if config.lora_rank and arm.line == "classic":
        current = ", ".join(name for name, other in ARMS.items() if other.line == "current")
        raise ConfigError(
            f"scale {config.scale} trains LoRA adapters, and {config.arm} (TRL 0.21) does not here; use {current}"
        )
    for option, source in (("--model", config.model), ("--documents", config.documents)):
        if source is not None and (source in ("", "hub:") or not source.isprintable()):
            raise ConfigError(f"{option} {shown(source)} names nothing; give a local path or hub:owner/name")
    local = not (config.model or "hub:").startswith("hub:")
    if local and not Path(config.model, "config.json").is_file():
        raise ConfigError(
            f"--model {shown(config.model)}: no such folder with a config.json; give one, or hub:owner/name"
        )
    if not config.documents.startswith("hub:") and config.documents != "builtin":
        if not Path(config.documents).exists():
            raise ConfigError(
                f"document source {shown(config.documents)} does not exist; give a file, a folder of .txt, "
                f"hub:owner/name or builtin"
            )


def not_for(arm: Arm, config: RunConfig) -> ConfigError:
    sharing = ", ".join(name for name, other in ARMS.items() if other.shares_prefix)
    return ConfigError(
        f"--completions-per-forward {shown(config.completions_per_forward)}: {arm.name} always takes "
        f"{arm.completions_per_forward(config.batch)}; leave the option out or use --arm {sharing}"
    )


def resolve(arm: str, k: int, scale: str, device: str, repeat: int = 0, **overrides) -> RunConfig:
    """Fill in a run's configuration from its scale; `overrides` that are None are left to the scale.

    Raises `ConfigError` for whatever `check` refuses. Loads nothing.
    """
    choose("arm", arm, ARMS)
    choose("scale", scale, SCALES)
    base = SCALES[scale]
    config = RunConfig(
        arm=arm,
        scale=scale,
        k=k,
        batch=k * base.prompts,
        repeat=repeat,
        seed=42 + repeat,
        shape=base.shape,
        model=None,
        documents="builtin",
        vocab_size=base.vocab_size,
        prompt_tokens=base.prompt_tokens,
        completion_tokens=base.completion_tokens,
        budget_bytes=base.budget_bytes,
        steps=base.steps,
        epochs=base.epochs,
        learning_rate=base.learning_rate,
        temperature=base.temperature,
        precision=base.precision,
        reward=base.reward,
        lora_rank=base.lora_rank,
        freed_memory=base.freed_memory,
        device=device,
        interval=0.05,
        threads=min(os.cpu_count() or 1, LIMITS["threads"][1]),
        completions_per_forward=0,  # depends on the batch
    )
    given = {name: value for name, value in overrides.items() if value is not None}
    config = replace(config, **given)
    if "completions_per_forward" not in given:
        config = replace(config, completions_per_forward=ARMS[arm].completions_per_forward(config.batch))
    elif not ARMS[arm].shares_prefix:  # asked for, if only by chance with the number that it takes
        raise not_for(ARMS[arm], config)
    check(config)
    return config


def default_scale(device_kind: str) -> str:
    return "seed" if device_kind == "cuda" else "cpu"


def machine_folder(results: Path | None, machine: str) -> Path:
    """`results`/`machine`, absolute; with None, the clone's own. Raises `ConfigError` where `machine` is more than the
    name of a folder."""
    if machine in ("", ".", "..") or "/" in machine or machine.startswith(("-", ".")) or not machine.isprintable():
        raise ConfigError(f"--machine {shown(machine)} is not one plain folder name; write it like nvidia-h200")
    return (results or ROOT / "results").absolute() / machine
