"""What can be changed about a training so that it needs less memory: what it costs, and what it leaves as it is."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rloo_memory.errors import ConfigError
from rloo_memory.plan.setups import Setup, check


@dataclass(frozen=True)
class Lever:
    """One change. `apply` returns the changed setup, or the same one where the change does not apply. With words in
    `same` the training is the same but for these, `only_if` the setup is so; `cost` is what it takes, in words or of a
    setup."""

    name: str
    cost: str | Callable[[Setup], str]
    apply: Callable[[Setup], Setup]
    same: str = ""
    only_if: Callable[[Setup], bool] = lambda setup: True

    def exact(self, setup: Setup) -> bool:
        return self.same != "" and self.only_if(setup)

    def effect(self, setup: Setup) -> str:
        """What the change does to a training as `setup`, in words."""
        same = f"trains the same ({self.same})" if self.exact(setup) else "trains differently"
        return f"{same}; {self.cost if isinstance(self.cost, str) else self.cost(setup)}"


def cost_of_offloading(setup: Setup) -> str:
    again = setup.gradient_checkpointing and setup.tokens_per_forward is not None
    return "transfers, host memory" + (", in place of computing passes again" if again else "")


def drops_out(setup: Setup) -> bool:
    return bool(setup.lora_rank and setup.lora_dropout)


def keeps_updates(setup: Setup) -> bool:
    """Whether an update keeps its rows when each micro-batch becomes one prompt's group or a part of it, and where the
    loss is scaled by what shares a micro-batch, whether that stays the same."""
    one_batch = setup.generation_rows == setup.per_device_train_batch_size == setup.num_generations
    return setup.rows_per_update % setup.num_generations == 0 and (one_batch or not setup.scaled_by_batch)


def fewer_at_once(setup: Setup) -> Setup:
    """As few prompts a rollout as make whole micro-batches."""
    k = setup.num_generations
    steps = k // math.gcd(setup.per_device_train_batch_size, k)
    return setup if steps >= setup.steps_per_generation else replace(setup, steps_per_generation=steps)


def rollout_is_in_an_update(setup: Setup) -> bool:
    """Whether all that is generated together is trained on before the policy changes, and once. Then the same policy
    generates it in parts. Otherwise rollouts were older than the policy, or trained on twice, and now are less so."""
    return (
        setup.num_iterations == 1
        and setup.gradient_accumulation_steps % setup.steps_per_generation == 0
        and not setup.scaled_by_rollout
        and not setup.scaled_by_batch  # rows of other prompts share a micro-batch
    )


def one_completion_a_pass(setup: Setup) -> Setup:
    if setup.splits_groups:
        return replace(setup.with_rows(1), tokens_per_forward=None)
    if setup.prefix_sharing:
        return setup.with_passes(1)
    return setup.arm("stock-accumulate")


def quantize(setup: Setup, bits: int) -> Setup:
    if setup.weight_bits <= bits or setup.fp16:  # whose GradScaler takes no gradients of TRL's bfloat16 adapters
        return setup
    nested = bits == 4 or setup.nested_scales
    return replace(lora(setup), weight_bits=bits, nested_scales=nested, dtype="bfloat16")


def lora(setup: Setup) -> Setup:
    if setup.lora_rank:
        return setup
    dtype = setup.autocast or "bfloat16" if setup.dtype == "float32" else setup.dtype  # of what is frozen
    return replace(
        setup, lora_rank=16, lora_target_modules="all-linear", lora_dropout=0.0, offload_reference=False, dtype=dtype
    )


def in_bfloat16(setup: Setup) -> Setup:
    """FSDP2 and DeepSpeed keep trained weights in float32 all the same; beside float16 it would make float32."""
    useless = setup.fp16 or setup.keeps_float32 and not setup.lora_rank
    return setup if useless else replace(setup, dtype="bfloat16")


def cost_of_bfloat16(setup: Setup) -> str:
    if setup.lora_rank:
        return "frozen weights are rounded, adapters are not"
    return "at learning rates such as 1e-6 most updates round to nothing (1.9 % of weights moved, in float32 99.9 %)"


def half_the_completion(setup: Setup) -> Setup:
    half = setup.max_completion_length // 2
    return setup if half < 16 else replace(setup, max_completion_length=half)


def half_of_k(setup: Setup) -> Setup:
    k = setup.num_generations // 2
    return setup if k < 2 or setup.num_generations % 2 else setup.with_k(k)


ROUNDING, TRANSFERS = "gradients equal up to rounding", "the same numbers, moved"
# In the order in which they are tried: what trains the same and costs little comes first
SHARING = Lever(
    "prefix_sharing", lambda s: f"token ratio {s.token_ratio:.1f}", lambda s: s if drops_out(s) else s.arm("shared"),
    ROUNDING, keeps_updates,
)  # fmt: skip
LEVERS = (
    SHARING,
    Lever("gradient_checkpointing", "a second forward", lambda s: replace(s, gradient_checkpointing=True), ROUNDING),
    Lever(
        "steps_per_generation", "fewer completions decode together", fewer_at_once,
        "the same policy generates, with other random numbers", rollout_is_in_an_update,
    ),
    Lever(
        "one completion a pass", "slower: smaller passes", one_completion_a_pass, ROUNDING,
        lambda s: s.prefix_sharing and not s.splits_groups or not s.scaled_by_batch and not drops_out(s),
    ),
    Lever(
        "offload_reference", "the reference's weights cross the bus once a rollout",
        lambda s: s if s.lora_rank or not s.beta else replace(s, offload_reference=True), TRANSFERS,
    ),
    Lever(
        "offload_reward", "the reward model's, likewise",
        lambda s: s if s.reward_model is None else replace(s, offload_reward=True), TRANSFERS,
    ),
    Lever("activation_offloading", cost_of_offloading, lambda s: replace(s, activation_offloading=True), TRANSFERS),
    Lever(
        "vllm_enable_sleep_mode", "vLLM's weights are loaded again each rollout",
        lambda s: replace(s, vllm_enable_sleep_mode=True) if s.vllm_bytes else s, "the same numbers, loaded again",
    ),
    Lever(
        "prefix_sharing, lora_dropout: 0", "adapters train without dropout",
        lambda s: replace(s, lora_dropout=0.0).arm("shared") if drops_out(s) else s,
    ),
    Lever(
        "optim: adamw_bnb_8bit", "moments rounded to 8 bits",
        lambda s: s if "8bit" in s.optim else replace(s, optim="adamw_bnb_8bit"),
    ),
    Lever("optim: paged_adamw_8bit", "the same, and transfers", lambda s: replace(s, optim="paged_adamw_8bit")),
    Lever("beta: 0", "no KL term", lambda s: s if s.lora_rank else replace(s, beta=0.0, offload_reference=False)),
    Lever("LoRA, rank 16", "adapters are trained, not the weights", lora),
    Lever("dtype: bfloat16", cost_of_bfloat16, in_bfloat16),
    Lever("LoRA on 8-bit weights", "the same, and rounded weights", lambda s: quantize(s, 8)),
    Lever("LoRA on 4-bit weights", "the same, rounded more", lambda s: quantize(s, 4)),
    Lever("half of k", "a noisier baseline", half_of_k),
    Lever("half the completion", "longer answers are cut", half_the_completion),
)  # fmt: skip


def is_accepted(setup: Setup, hf_config) -> bool:
    """Whether `check` has nothing against it."""
    try:
        check(setup, hf_config)
    except ConfigError:
        return False
    return True


def applied(lever: Lever, setup: Setup, hf_config) -> Setup | None:
    """What the lever makes of `setup`; None where it changes nothing, or no trainer would accept it."""
    trial = lever.apply(setup)
    return trial if trial != setup and is_accepted(trial, hf_config) else None
