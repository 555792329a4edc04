"""What can be run: arms, scales, and the one frozen configuration that describes a run completely."""

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


class ConfigError(ValueError):
    """A setting that cannot work. Its text is one line: the value, the limit, the remedy."""


EXIT_USAGE = 2  # a setting that cannot work


def exit_code(program: str, run, args) -> int:
    """What `run(args)` returns, or `EXIT_USAGE` with one line on stderr where it raises `ConfigError`."""
    try:
        return run(args)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USAGE


@dataclass(frozen=True)
class Arm:
    """One trainer to compare. `line` is a line of the fork (`trl/UPSTREAM.toml`)."""

    name: str
    line: str
    patches: tuple[str, ...] | None  # applied to the line: () is untouched upstream, None the whole series
    shows: str
    accumulate: bool = False  # one completion a forward, gradients accumulated over the batch
    shares_prefix: bool = False  # the prompt computed once, the completions in passes of some

    def completions_per_forward(self, batch: int) -> int:
        """How many completions go through the model together, unless a run asks for another number."""
        if self.shares_prefix:
            return 2  # k is never less
        return 1 if self.accumulate else batch


ARMS = {
    arm.name: arm
    for arm in (
        Arm("classic-baseline", "classic", (), "TRL 0.21.0 untouched: the published baseline"),
        Arm("classic-string", "classic", ("0001-string-level-repeat.patch",), "the change exactly as published"),
        Arm(
            "classic-string-exact",
            "classic",
            ("0002-string-level-repeat-exact.patch",),
            "the same idea with nothing cut: what it saves by itself",
        ),
        Arm("classic-lean", "classic", ("0003-lean-logits.patch",), "logits only where they are read"),
        Arm("stock", "current", (), "TRL 1.16.0 untouched, the whole batch in one pass"),
        Arm("stock-accumulate", "current", (), "TRL 1.16.0 untouched, one completion a pass", accumulate=True),
        Arm("stock-compact", "current", None, "the same with the compact LM head alone: prefix sharing off"),
        Arm("shared", "current", None, "TRL 1.16.0 + prefix sharing, N completions a pass", shares_prefix=True),
    )
}


@dataclass(frozen=True)
class Scale:
    """A workload. Token counts are per sequence, `budget_bytes` is what torch may allocate before "out of memory"."""

    name: str
    shape: str  # a name in models.SHAPES
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


def real_shape(shape: str, prompt: int, completion: int, lora_rank: int = 0) -> Scale:
    """A model as published, random weights, one prompt and one epoch a rollout, for a card of 80 GiB."""
    name = f"{shape}{'-lora' if lora_rank else ''}-p{prompt}-c{completion}"
    return Scale(
        name,
        shape,
        151_936,
        prompt,
        completion,
        80 * GIB,
        epochs=1,
        temperature=1.0,
        precision="bfloat16",
        reward="letters",
        lora_rank=lora_rank,
    )


# `seed` is the published workload. `cpu` keeps its token counts and divides vocabulary and budget by 8, so that the
# same cells run out of memory on two cores and a few GiB. `short` has nothing to cut. `exact` is `cpu` in float64, to
# compare two trainers' losses at full length beyond float32's rounding. `learn` is there to compare training curves,
# in float64 because Adam turns the rounding noise of a gradient that should be zero into steps, and one sampled token
# that differs makes two runs part. `bench` is large enough that a step's time is the model's, for speed.
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
        Scale(
            "bench", "qwen3-8-layers", 32_000, 3000, 100, 12 * GIB, steps=1, epochs=1, temperature=1.0,
            reward="letters",
        ),
        Scale(
            "test-lora", "tiny-qwen3", 512, 64, 8, 4 * GIB, steps=1, epochs=1, precision="bfloat16", reward="letters",
            lora_rank=4,
        ),
        *(
            real_shape(shape, prompt, completion, lora_rank)
            for shape, lora_rank in (("qwen3-0.6b", 0), ("qwen3-1.7b", 0), ("qwen3-8b", 16))
            for prompt in (1000, 3000, 8000)
            for completion in (100, 512)
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


def choose(kind: str, name: str, choices) -> str:
    """`name`, which must be one of `choices`. Raises `ConfigError`."""
    if name not in choices:
        raise ConfigError(f"unknown {kind} {name!r}; choose one of: {', '.join(choices)}")
    return name


def resolve(arm: str, k: int, scale: str, device: str, repeat: int = 0, **overrides) -> RunConfig:
    """Fill in a run's configuration from its scale; `overrides` that are None are left to the scale.

    Raises `ConfigError` for an unknown name or a combination that cannot run. Loads nothing.
    """
    choose("arm", arm, ARMS)
    choose("scale", scale, SCALES)
    base = SCALES[scale]
    if k < 2:
        raise ConfigError(f"k={k}: leave-one-out needs at least 2 completions per prompt; use --k 2 or more")
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
        device=device,
        interval=0.05,
        threads=os.cpu_count() or 1,
        completions_per_forward=0,  # depends on the batch
    )
    given = {name: value for name, value in overrides.items() if value is not None}
    config = replace(config, **given)
    if "completions_per_forward" not in given:
        config = replace(config, completions_per_forward=ARMS[arm].completions_per_forward(config.batch))
    elif not ARMS[arm].shares_prefix:
        sharing = ", ".join(name for name, other in ARMS.items() if other.shares_prefix)
        raise ConfigError(
            f"--completions-per-forward {config.completions_per_forward}: {arm} always takes "
            f"{ARMS[arm].completions_per_forward(config.batch)}; leave the option out or use --arm {sharing}"
        )
    elif not 1 <= config.completions_per_forward <= k:
        raise ConfigError(
            f"--completions-per-forward {config.completions_per_forward} is outside 1 to k={k}: completions of one "
            f"prompt go together; use {min(max(1, config.completions_per_forward), k)}"
        )
    for name in ("batch", "prompt_tokens", "completion_tokens", "steps", "epochs", "budget_bytes", "threads"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(config, name)}; it must be at least 1")
    if config.batch % k:
        raise ConfigError(
            f"batch {config.batch} is not divisible by k={k}: completions of a prompt would be split; "
            f"use --batch {k * max(1, round(config.batch / k))}"
        )
    if config.prompt_tokens < 16:
        raise ConfigError(f"--prompt-tokens {config.prompt_tokens} leaves no room for a chat template; use 16 or more")
    if not 0.01 <= config.interval <= 1:
        raise ConfigError(f"--interval {config.interval} s is outside 0.01 to 1 s; the default is 0.05")
    choose("precision", config.precision, ("float64", "float32", "bf16", "bfloat16"))
    if config.lora_rank and ARMS[arm].line == "classic":
        current = ", ".join(name for name, other in ARMS.items() if other.line == "current")
        raise ConfigError(f"scale {scale} trains LoRA adapters, and {arm} (TRL 0.21) does not here; use {current}")
    choose("reward", config.reward, ("model", "letters"))
    return config


def default_scale(device_kind: str) -> str:
    return "seed" if device_kind == "cuda" else "cpu"


def parse_bytes(text: str) -> int:
    """Bytes from "32GiB", "1.5 GB", "800MiB" or a plain number of bytes. Raises `ConfigError`."""
    units = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": GIB}
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in units:
        raise ConfigError(f"cannot read the size {text!r}; write it like 32GiB, 800MiB or 4000000000")
    return int(float(match[1]) * units[match[2]])


def machine_name(device_kind: str, device_name: str) -> str:
    """Folder name under results/: the GPU's name, or the processor's with its core count."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|@.*|\bcpu\b", " ", device_name.lower())).strip("-")
    return slug if device_kind == "cuda" else f"cpu-{slug}-{os.cpu_count()}-cores"


def cpu_name() -> str:
    """The processor's name as Linux gives it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
