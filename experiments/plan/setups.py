"""What decides a training's memory, under TRL's own names, and its settings as TRL's parser reads them."""

from dataclasses import dataclass, replace

from experiments.config import ConfigError
from experiments.workload.models import is_model, named_config

ARM_NAMES = ("stock", "accumulate", "tokens", "shared")
LARGEST = {"k": "num_generations", "prompt": "prompt_tokens", "completion": "max_completion_length"}
# Bytes of state a trained weight, by `optim`; None runs torch's own AdamW. 8 bits: one byte for each of two moments
# and a float32 for 256 of them (bitsandbytes, arXiv 2110.02861). Adafactor: a row and a column of each matrix.
_8_BIT = 2 * (1 + 4 / 256)
OPTIMIZERS = {
    "adamw_torch": None, "adamw_torch_fused": None, "adamw_8bit": _8_BIT, "adamw_bnb_8bit": _8_BIT,
    "paged_adamw_8bit": _8_BIT, "paged_adamw_32bit": 8.0, "adafactor": 0.0, "sgd": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a training, under TRL's own names where it has one. Lengths are tokens."""

    prompt_tokens: int
    max_completion_length: int = 512
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    steps_per_generation: int = 1
    gradient_accumulation_steps: int = 1
    prefix_sharing: bool = False
    completions_per_forward: int | None = None
    tokens_per_forward: int | None = None
    dtype: str = "bfloat16"
    bf16: bool = True
    gradient_checkpointing: bool = True
    activation_offloading: bool = False
    beta: float = 0.05
    offload_reference: bool = False  # on the host except while it scores
    reward_model: str | None = None  # as `models.named_config` takes it, or "policy": of the policy's shape
    offload_reward: bool = False
    lora_rank: int = 0  # 0 trains every weight
    weight_bits: int = 16  # 4 or 8: quantized by bitsandbytes
    optim: str = "adamw_torch_fused"
    temperature: float = 1.0
    padded: bool = True  # completions differ in length
    padded_prompts: bool = False  # prompts of a batch differ in length
    device: str = "cuda"  # "cpu" has no Triton
    num_devices: int = 1
    fully_sharded: bool = False  # FSDP2 with reshard_after_forward; otherwise DDP
    offload_parameters: bool = False  # FSDP2's shards on the host

    @property
    def generation_rows(self) -> int:
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def rows_per_pass(self) -> int | None:
        """Rows, with prefix sharing completions, that go through the model together; None: all of them."""
        if self.tokens_per_forward is None:
            return self.completions_per_forward
        tokens = self.max_completion_length + (1 if self.prefix_sharing else self.prompt_tokens)
        return max(1, self.tokens_per_forward // tokens)

    @property
    def needs_fork(self) -> bool:
        return self.prefix_sharing or self.tokens_per_forward is not None

    @property
    def optimizer_bytes_per_weight(self) -> float | None:
        return OPTIMIZERS[self.optim]

    @property
    def optimizer_on_host(self) -> bool:
        """Paged state is in unified memory, which the driver moves to the host when the device is full."""
        return self.optim.startswith("paged")

    def arm(self, name: str) -> "Setup":
        """The same work done by one of `ARM_NAMES`: the micro-batch in one pass, row by row, in passes within the
        token budget, or shared."""
        plain = replace(self, prefix_sharing=False, completions_per_forward=None, tokens_per_forward=None)
        if name == "stock":
            return plain
        if name == "accumulate":
            return plain.with_rows(1)
        if name == "tokens":
            return replace(plain, tokens_per_forward=self.tokens_per_forward)
        per_forward = self.completions_per_forward
        if per_forward is None and self.tokens_per_forward is None and not self.prefix_sharing:
            per_forward = min(2, self.num_generations)
        whole_groups = self.with_rows(self.num_generations)
        return replace(whole_groups, prefix_sharing=True, completions_per_forward=per_forward)

    def with_rows(self, rows: int) -> "Setup":
        """As much work in micro-batches of `rows`."""
        total = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return replace(
            self,
            per_device_train_batch_size=rows,
            steps_per_generation=max(1, self.generation_rows // rows),
            gradient_accumulation_steps=max(1, total // rows),
        )

    def with_k(self, k: int) -> "Setup":
        """As many prompts with k completions each, in as many micro-batches."""
        rows = max(1, self.per_device_train_batch_size * k // self.num_generations)
        per_forward = min(self.completions_per_forward, k) if self.completions_per_forward else None
        return replace(self, num_generations=k, per_device_train_batch_size=rows, completions_per_forward=per_forward)


def from_settings(prompt_tokens: int, settings: dict) -> Setup:
    """The setup that TRL's settings ask for; what does not decide memory is left out. Where a setting is missing, the
    default is that of `Setup`."""
    known = {name: value for name, value in settings.items() if name in Setup.__dataclass_fields__}
    if known.get("bf16") is None:
        known.pop("bf16", None)
    if settings.get("use_peft"):
        known["lora_rank"] = settings.get("lora_r", 16)
    if bits := 4 * bool(settings.get("load_in_4bit")) or 8 * bool(settings.get("load_in_8bit")):
        known["weight_bits"] = bits
    if is_model(settings.get("reward") or ""):  # others are functions
        known["reward_model"] = settings["reward"]
    known.setdefault("steps_per_generation", known.get("gradient_accumulation_steps", 1))  # as TRL does
    return Setup(prompt_tokens=prompt_tokens, **known)


def to_settings(setup: Setup) -> dict:
    """TRL's settings for a setup, in the order in which a reader wants them."""
    settings = {"dtype": setup.dtype, "bf16": setup.bf16}
    if setup.weight_bits == 4:
        settings |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    elif setup.weight_bits == 8:
        settings |= {"load_in_8bit": True}
    if setup.lora_rank:
        settings |= {"use_peft": True, "lora_r": setup.lora_rank, "lora_target_modules": "all-linear"}
        settings["lora_dropout"] = 0.0  # completions that share a prompt would share its dropout
    settings["beta"] = setup.beta
    if setup.offload_reference:
        settings["offload_reference"] = True
    if setup.reward_model not in (None, "policy"):
        settings["reward"] = setup.reward_model
    if setup.offload_reward:
        settings["offload_reward"] = True
    if setup.prefix_sharing:
        settings["prefix_sharing"] = True
    for name in ("completions_per_forward", "tokens_per_forward"):
        if getattr(setup, name) is not None:
            settings[name] = getattr(setup, name)
    return settings | {
        "num_generations": setup.num_generations,
        "per_device_train_batch_size": setup.per_device_train_batch_size,
        "steps_per_generation": setup.steps_per_generation,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "max_completion_length": setup.max_completion_length,
        "temperature": setup.temperature,
        "gradient_checkpointing": setup.gradient_checkpointing,
        "activation_offloading": setup.activation_offloading,
        "optim": setup.optim,
    }


def check(setup: Setup, hf_config) -> None:
    """Raise `ConfigError` for a setup that no trainer would accept."""
    for name in ("prompt_tokens", "max_completion_length", "per_device_train_batch_size", "steps_per_generation"):
        if getattr(setup, name) < 1:
            raise ConfigError(f"{name} is {getattr(setup, name)}; it must be at least 1")
    k = setup.num_generations
    if k < 2:
        raise ConfigError(f"num_generations is {k}: leave-one-out needs at least 2 completions a prompt")
    if setup.generation_rows % k:
        raise ConfigError(
            f"per_device_train_batch_size {setup.per_device_train_batch_size} x steps_per_generation "
            f"{setup.steps_per_generation} is not a multiple of num_generations {k}; use a batch of {k}"
        )
    if setup.completions_per_forward is not None and not 1 <= setup.completions_per_forward <= k:
        raise ConfigError(f"completions_per_forward {setup.completions_per_forward} is outside 1 to k={k}")
    if setup.tokens_per_forward is not None:
        if setup.tokens_per_forward < 1:
            raise ConfigError(f"tokens_per_forward is {setup.tokens_per_forward}; it must be at least 1")
        if setup.completions_per_forward is not None:
            raise ConfigError(
                f"tokens_per_forward {setup.tokens_per_forward} and completions_per_forward "
                f"{setup.completions_per_forward} both say what goes through the model together; remove one of them"
            )
    if setup.optim not in OPTIMIZERS:
        raise ConfigError(f"optim {setup.optim!r} is not one that the plan knows: {', '.join(OPTIMIZERS)}")
    if setup.weight_bits < 16 and not setup.lora_rank:
        raise ConfigError(f"{setup.weight_bits}-bit weights cannot be trained themselves; add LoRA: --lora 16")
    if setup.offload_reference and (setup.lora_rank or not setup.beta):
        why = "LoRA needs no second model" if setup.lora_rank else "beta 0 needs no reference"
        raise ConfigError(f"offload_reference is on, but there is none to offload: {why}; remove it")
    if setup.offload_reward and setup.reward_model is None:
        raise ConfigError("offload_reward is on, but there is no reward model; remove it, or name one: --reward-model")
    if setup.reward_model not in (None, "policy"):
        named_config(setup.reward_model)
    if setup.dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype {setup.dtype!r}: choose bfloat16, float16 or float32")
    length, positions = setup.prompt_tokens + setup.max_completion_length, hf_config.max_position_embeddings
    if length > positions:
        raise ConfigError(
            f"prompt {setup.prompt_tokens} + completion {setup.max_completion_length} = {length} tokens exceed the "
            f"model's {positions} positions"
        )
