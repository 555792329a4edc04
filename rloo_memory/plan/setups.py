"""What decides a training's memory, under TRL's own names, and which of it cannot work."""

import math
from dataclasses import MISSING, dataclass, field, fields, replace

from rloo_memory.errors import ConfigError, choose
from rloo_memory.installed_trl import lm_head_here, wrong_on_cpu
from rloo_memory.models import meta_model
from rloo_memory.plan.checkpoint import quantized
from rloo_memory.plan.images import wrong_images
from rloo_memory.plan.ranges import ABOVE_0, AT_LEAST_1, DROPOUT, GROUP, NOT_NEGATIVE, RANK, SHARE, Range
from rloo_memory.sizes import GIB

# Arms with TRL's LM heads of other days, and which one (`rloo_memory.plan.simulation.heads`)
OLDER = {"stock-1.9": "full_logits_in_place", "stock-1.13": "full_logits", "stock-1.14": "full_logits_in_a_kernel"}
# The arms of `experiments.arms.ARMS` that the planner knows, and those that are the planner's alone: `OLDER`, and
# `stock-tokens`, a token budget without sharing
ARM_NAMES = (*OLDER, "stock", "stock-accumulate", "stock-tokens", "shared")
LARGEST = {"k": "num_generations", "prompt": "prompt_tokens", "completion": "max_completion_length"}
# Bytes of state a trained weight, by `optim`; None runs torch's own AdamW. 8 bits: one byte for each of two moments
# and a float32 for 256 of them (bitsandbytes, arXiv 2110.02861). Adafactor runs, too: little of it stays.
_8_BIT = 2 * (1 + 4 / 256)
OPTIMIZERS = {
    "adamw_torch": None, "adamw_torch_fused": None, "adamw_8bit": _8_BIT, "adamw_bnb_8bit": _8_BIT,
    "paged_adamw_8bit": _8_BIT, "paged_adamw_32bit": 8.0, "adafactor": 0.0, "sgd": 0.0,
}  # fmt: skip
MOST_TOKENS = 2**27  # of a rollout: their ids are real numbers, also where all else has no values


def setting(default, about=None, within: Range | None = None, option=None, *, of_trl=True, written=False, **keywords):
    """A field of `Setup`; TRL or the launcher has a setting of that name if `of_trl`. One with words `about` it is an
    option, called as the field or `option`, with argparse's `keywords`; one of a bool asks for the opposite.
    `written`: a command line's settings have it even if nobody asks, as TRL's default is or was another."""
    of_option = dict(about=about, option=option, keywords=keywords)
    return field(default=default, metadata=dict(within=within, of_trl=of_trl, written=written, **of_option))


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a training, under TRL's own names where it has one. Lengths are tokens."""

    prompt_tokens: int = setting(
        MISSING, "tokens of the longest prompt; default: max_prompt_tokens", AT_LEAST_1, "--prompt", of_trl=False
    )
    max_completion_length: int = setting(512, "tokens of the longest", AT_LEAST_1, "--completion", written=True)
    num_generations: int = setting(8, "completions a prompt", GROUP, "--k", written=True)
    per_device_train_batch_size: int = setting(8, within=AT_LEAST_1, written=True)
    steps_per_generation: int = setting(1, within=AT_LEAST_1, written=True)
    gradient_accumulation_steps: int = setting(1, within=AT_LEAST_1, written=True)
    prefix_sharing: bool = setting(False)
    shares_generation: bool = False  # and nothing else, as `as_run` says
    padded_to: int | None = None  # tokens of the longest completion, where these are shorter; None: they are as long
    tokens_per_forward: int | None = setting(None, "tokens that go together, with or without sharing", AT_LEAST_1)
    dtype: str | None = setting(None, "of the weights; default float32, with --lora bfloat16")  # as `__post_init__`
    bf16: bool = setting(True, written=True)  # autocast
    fp16: bool = setting(False)  # autocast in float16; what its GradScaler holds is a few numbers
    gradient_checkpointing: bool = setting(
        True, "each layer keeps its activations", option="--no-gradient-checkpointing", written=True
    )
    activation_offloading: bool = setting(False, "what the backward needs waits on the host")
    beta: float = setting(0.05, "0 needs no reference model", NOT_NEGATIVE, written=True)
    reference_dtype: str | None = None  # None: the policy's
    offload_reference: bool = setting(False, "on the host except while it scores")
    # As `models.named_config` takes it, or "policy": of the policy's shape
    reward_model: str | None = setting(None, "one that scores, named as --model is; default: a function", of_trl=False)
    offload_reward: bool = setting(False, "the reward model, likewise")
    lora_rank: int = setting(0, "train LoRA adapters; 0 trains every weight", RANK, "--lora", of_trl=False)
    lora_target_modules: str | tuple[str, ...] | None = "all-linear"  # None: those that PEFT has for the model
    lora_dropout: float = setting(0.0, within=DROPOUT)
    # 4 or 8: quantized by bitsandbytes
    weight_bits: int = setting(16, "bits of a frozen weight", option="--bits", of_trl=False, choices=(4, 8, 16))
    nested_scales: bool = True  # of 4-bit weights: their scales are quantized, too
    optim: str = setting("adamw_torch_fused", ", ".join(OPTIMIZERS), written=True)
    temperature: float = setting(1.0, within=ABOVE_0, written=True)  # which divides the logits
    top_k: int = setting(0, within=Range(lambda x: x >= 0, "0, which takes all, or more"))
    top_p: float = setting(1.0, within=SHARE)  # for which logits are sorted
    min_p: float | None = setting(None, within=Range(lambda x: 0 <= x <= 1, "from 0 to 1", whole=False))
    attn_implementation: str | None = setting(None)  # "eager" holds all scores, others what FlashAttention does
    padded: bool = True  # completions differ in length, and TRL pads a rollout's rows to the longest: they need a mask
    images: tuple[tuple[int, int], ...] = setting(  # width and height, as the model gets them
        (), "pixels of an image of each prompt, as the processor scales it; once for each image. --prompt counts its "
        "tokens, too", option="--image", of_trl=False, action="append", metavar="WIDTHxHEIGHT",
    )  # fmt: skip
    lm_head: str | None = None  # one of `rloo_memory.plan.simulation.heads.HEADS`; None: that of the installed TRL
    use_liger_kernel: bool = setting(False)  # its layers, of which nothing is predicted
    use_transformers_continuous_batching: bool = setting(False)
    use_vllm: bool = setting(False)  # it generates, not transformers
    vllm_mode: str = setting("colocate")  # on the trainer's device; "server": elsewhere
    vllm_gpu_memory_utilization: float = setting(0.3, within=SHARE)  # its share of the device
    vllm_tensor_parallel_size: int = setting(1, within=AT_LEAST_1)  # devices that share its weights
    vllm_enable_sleep_mode: bool = setting(False)  # it has its share only while it generates
    # "cpu" has no Triton
    device: str = setting("cuda", "default cuda, or the run's", of_trl=False, choices=("cuda", "cpu"))
    device_memory: int = 0  # bytes of the device, of which vLLM takes a share; 0: not known
    num_devices: int = setting(1, within=AT_LEAST_1, of_trl=False)
    fully_sharded: bool = False  # FSDP2 with reshard_after_forward; otherwise DDP, or DeepSpeed
    zero_stage: int = 0  # DeepSpeed's ZeRO: 2 or 3
    offload_parameters: bool = False  # shards of weights on the host: all of FSDP2's, the 16-bit ones of ZeRO-3
    offload_optimizer: bool = False  # ZeRO's float32 weights, moments and gradients, likewise
    ds3_gather_for_generation: bool = setting(True)  # ZeRO-3: whole weights on each device while it generates
    # What does not decide memory, but whether a change trains the same
    num_iterations: int = setting(1, within=AT_LEAST_1)
    scaled_by_rollout: bool = False  # the loss, by what was generated together: GRPO, normalize_advantages
    scaled_by_batch: bool = False  # the loss, by what shares a micro-batch: `trl_settings.by_batch`
    rescores_older: bool = False  # GRPO: the policy scores a rollout only if it changes before all is trained on

    def __post_init__(self):
        if self.dtype is None:  # in bfloat16 an update of 1e-6 is below half of a weight's last digit
            object.__setattr__(self, "dtype", "bfloat16" if self.lora_rank else "float32")
        if self.lm_head is None:
            object.__setattr__(self, "lm_head", lm_head_here())

    @property
    def generation_rows(self) -> int:
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def rows_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def token_ratio(self) -> float:
        """Tokens of whole rows to tokens with each prompt once: k (P + C) / (P + k C). More where completions are
        shorter than the longest, to which whole rows are padded."""
        k, prompt, completion = self.num_generations, self.prompt_tokens, self.max_completion_length
        return k * (prompt + completion) / (prompt + k * completion)

    @property
    def as_run(self) -> "Setup":
        """Where prompts are so short that sharing them saves no time, rows are scored and trained whole, as
        `prefix_sharing.token_budget.saves_time` decides by the same numbers of tokens."""
        from rloo_memory.prefix_sharing.token_budget import SAVES_TIME_FROM

        k, prompt, completion = self.num_generations, self.prompt_tokens, self.max_completion_length
        whole = k * (prompt + (self.padded_to or completion))
        saves_time = whole >= SAVES_TIME_FROM * (prompt - 1 + k * (completion + 1))
        if not self.prefix_sharing or self.images or saves_time:
            return self
        return replace(self, prefix_sharing=False, shares_generation=True)

    @property
    def splits_groups(self) -> bool:
        """Whether the completions of a shared prompt are spread over several micro-batches."""
        return self.prefix_sharing and self.per_device_train_batch_size < self.num_generations

    @property
    def rows_to_score(self) -> int:
        """Rows that are scored together."""
        return self.num_generations if self.splits_groups else self.per_device_train_batch_size

    @property
    def scores_policy(self) -> bool:
        """Whether the policy's own log-probabilities are computed before it trains."""
        aligned = self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0
        return not (self.rescores_older and aligned)

    @property
    def positions_to_score(self) -> int:
        """Of a whole row. On a CPU, TRL's fused LM head takes those of the prompt, too."""
        every = self.device == "cpu" and self.lm_head == "fused"
        return self.max_completion_length + (self.prompt_tokens - 1 if every else 0)

    @property
    def rows_per_pass(self) -> int | None:
        """Rows, with prefix sharing completions, that go through the model together; None: all of them."""
        if self.tokens_per_forward is None:
            return self.per_device_train_batch_size if self.splits_groups else None
        tokens = self.max_completion_length + (1 if self.prefix_sharing else self.prompt_tokens)
        return max(1, self.tokens_per_forward // tokens)

    @property
    def autocast(self) -> str | None:
        """The dtype of mixed precision, if it is on."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else None

    @property
    def is_distributed(self) -> bool:
        """FSDP2 and DeepSpeed work as such on one device, too."""
        return self.num_devices > 1 or self.fully_sharded or self.zero_stage > 0

    @property
    def keeps_float32(self) -> bool:
        """Whether FSDP2 or DeepSpeed train float32 shards of weights that compute in half precision."""
        return self.autocast is not None and (self.fully_sharded or self.zero_stage > 0)

    @property
    def in_words(self) -> str:
        """What is trained, and with what: the choices that decide most."""
        shards = self.keeps_float32 and not self.lora_rank
        bits = "float32 shards" if shards else f"{self.weight_bits}-bit" if self.weight_bits < 16 else self.dtype
        what = f"LoRA of rank {self.lora_rank} on {bits} weights" if self.lora_rank else f"all weights, {bits}"
        return f"{what}, beta {self.beta:g}, {self.optim}"

    @property
    def uses_passes(self) -> bool:
        return self.prefix_sharing or self.shares_generation or self.tokens_per_forward is not None

    @property
    def vllm_bytes(self) -> int:
        """What vLLM takes of a GPU whose memory is known."""
        here = self.use_vllm and self.vllm_mode == "colocate" and self.device == "cuda"
        return round(self.vllm_gpu_memory_utilization * self.device_memory) if here else 0

    @property
    def optimizer_bytes_per_weight(self) -> float | None:
        return OPTIMIZERS[self.optim]

    def arm(self, name: str) -> "Setup":
        """The same work done by one of `ARM_NAMES`: the micro-batch in one pass, of this TRL or an older one, row by
        row, in passes within the token budget, or shared. One whose groups are split takes them at once, where
        prompts are not shared. Raises `ConfigError` for another name."""
        choose("arm", name, ARM_NAMES)
        if name == "shared":
            return self.shared()
        if name == "stock-tokens":
            return replace(self, prefix_sharing=False)
        at_once = self.with_rows(self.num_generations) if self.splits_groups else self
        plain = replace(at_once, prefix_sharing=False, tokens_per_forward=None)
        if name == "stock-accumulate":
            return plain.with_rows(1)
        return replace(plain, lm_head=OLDER.get(name, plain.lm_head))

    def shared(self) -> "Setup":
        """In the same micro-batches where these can be parts of a group, else in micro-batches of two. Whole groups in
        passes where parts would hold the gradients of a whole training, or train differently."""
        k, batch = self.num_generations, self.per_device_train_batch_size
        if self.prefix_sharing:
            return self
        if batch < k and k % batch == self.rows_per_update % k == self.generation_rows % k == 0:
            return replace(self, prefix_sharing=True)
        if self.is_distributed or self.scaled_by_batch or self.tokens_per_forward:
            return self.with_shared_groups()
        return replace(self.with_rows(k).with_rows(2 if k % 2 == 0 else 1), prefix_sharing=True)

    def with_shared_groups(self) -> "Setup":
        """Each prompt's completions in one micro-batch, in passes within the token budget, or of two."""
        groups = replace(self.with_rows(self.num_generations), prefix_sharing=True)
        return groups if self.tokens_per_forward else groups.with_passes(2)

    @property
    def has_whole_groups(self) -> bool:
        return self.per_device_train_batch_size % self.num_generations == 0

    def with_rows(self, rows: int) -> "Setup":
        """As much work in micro-batches of `rows`; where an update has fewer, it gets more."""
        return replace(
            self,
            per_device_train_batch_size=rows,
            steps_per_generation=max(1, self.generation_rows // rows),
            gradient_accumulation_steps=max(1, self.rows_per_update // rows),
        )

    def with_passes(self, completions: int) -> "Setup":
        """With shared prompts in passes of so many completions, each with the last token of its prompt."""
        return replace(self, tokens_per_forward=completions * (self.max_completion_length + 1))

    def with_k(self, k: int) -> "Setup":
        """As many prompts with k completions each. Micro-batches hold as many whole groups as before; where they held
        parts of groups, no more rows than before."""
        before, rows = self.num_generations, self.per_device_train_batch_size
        prompts, of_update = self.generation_rows // before, self.rows_per_update / before
        if self.has_whole_groups:
            rows = rows // before * k
        else:
            rows = max(size for size in range(1, rows + 1) if (k if self.prefix_sharing else prompts * k) % size == 0)
        return replace(
            self,
            num_generations=k,
            per_device_train_batch_size=rows,
            steps_per_generation=prompts * k // rows,
            gradient_accumulation_steps=max(1, round(of_update * k / rows)),
        )


# Fields that settings have under the same name; and by the name of the field, its range and its option
SAME_NAME = tuple(declared.name for declared in fields(Setup) if declared.metadata.get("of_trl"))
RANGES = {declared.name: limits for declared in fields(Setup) if (limits := declared.metadata.get("within"))}
OPTIONS = {
    declared.name: declared.metadata["option"] or f"--{declared.name.replace('_', '-')}"
    for declared in fields(Setup)
    if declared.metadata.get("about")
}


def wrong_numbers(values: dict[str, object], called: dict[str, str]) -> list[str]:
    """A line for each of `values`, fields of `Setup`, that is no number or out of its range. `called` is what the user
    wrote for a field, else its own name."""
    lines = [limits.wrong(called.get(name, name), values.get(name)) for name, limits in RANGES.items()]
    return [line for line in lines if line]


def positions_of(hf_config) -> int | None:
    """Of the lengths that a model is made for; None where nothing ends them."""
    found = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def exceeded_positions(setup: Setup, hf_config) -> int | None:
    """Of the lengths that a model is made for, where rows are longer."""
    positions = positions_of(hf_config)
    return positions if positions and setup.prompt_tokens + setup.max_completion_length > positions else None


def too_long(setup: Setup, hf_config, called: dict[str, str]) -> str | None:
    """What to say of more tokens than the embedding of positions has; rotary ones go on behind those of the config."""
    if (positions := exceeded_positions(setup, hf_config)) is None:
        return None
    prompt, completion = setup.prompt_tokens, setup.max_completion_length
    embeddings = [module for module in meta_model(hf_config).modules() if type(module).__name__.endswith("Embedding")]
    if not any(0 <= getattr(module, "num_embeddings", 0) - positions <= 2 for module in embeddings):  # OPT has 2 more
        return None
    asked = f"{called['prompt_tokens']} {prompt} + {called['max_completion_length']} {completion}"
    return f"{asked} = {prompt + completion} tokens exceed the model's {positions} positions, which are learned"


def share_too_small(setup: Setup, hf_config) -> str | None:
    """What to say where vLLM's share of a device is below its weights, in 16 bits or quantized."""
    numbers = sum(p.numel() for p in meta_model(hf_config).parameters()) if setup.vllm_bytes else 0
    needed = numbers * setup.weight_bits / 8 / setup.vllm_tensor_parallel_size
    if setup.vllm_bytes >= needed:
        return None
    share = math.ceil(100 * needed / setup.device_memory) / 100
    remedy = f"set at least {share:.2f}" if share <= 1 else "let a server generate: vllm_mode server"
    return (
        f"vllm_gpu_memory_utilization {setup.vllm_gpu_memory_utilization:g} is {setup.vllm_bytes / GIB:.2f} GiB here, "
        f"and vLLM's weights alone are {needed / GIB:.2f}; {remedy}"
    )


def check(setup: Setup, hf_config, called: dict[str, str] | None = None) -> None:
    """Raise `ConfigError` for a setup that no trainer would accept, with all that is wrong. `called` is what the user
    wrote for a field of `Setup` ("--k" for `num_generations`), else it is called by its name."""
    called = {name: name for name in vars(setup)} | (called or {})
    if wrong := wrong_numbers(vars(setup), called):
        raise ConfigError("; ".join(wrong))
    k, batch, update = setup.num_generations, setup.per_device_train_batch_size, setup.rows_per_update
    k_called, prompt_called = called["num_generations"], called["prompt_tokens"]
    length = setup.prompt_tokens + setup.max_completion_length
    already = quantized(hf_config, setup.device)
    parts = setup.prefix_sharing and not setup.has_whole_groups
    no_reference = "LoRA needs no second model" if setup.lora_rank else "beta 0 needs no reference"
    reasons = {
        f"per_device_train_batch_size {batch} x steps_per_generation {setup.steps_per_generation} is not a multiple "
        f"of {k_called} {k}; use a batch of {k}": setup.generation_rows % k,
        f"per_device_train_batch_size {batch} is neither a multiple nor a divisor of {k_called} {k}, which "
        f"prefix_sharing needs; use {k}": parts and k % batch,
        f"per_device_train_batch_size {batch} x gradient_accumulation_steps {setup.gradient_accumulation_steps} is "
        f"not a multiple of {k_called} {k}, which prefix_sharing needs; accumulate {k // batch} steps":
            parts and not k % batch and update % k,
        f"optim {setup.optim!r} is not one that the plan knows: {', '.join(OPTIMIZERS)}":
            setup.optim not in OPTIMIZERS,
        f"the model's weights are already quantized, to {already and already.bits} bits "
        f"({already and already.method}), not to {setup.weight_bits}":
            already and setup.weight_bits != already.bits,
        f"{setup.weight_bits}-bit weights cannot be trained themselves; add LoRA: --lora 16":
            setup.weight_bits < 16 and not setup.lora_rank,
        f"offload_reference is on, but there is none to offload: {no_reference}; remove it":
            setup.offload_reference and (setup.lora_rank or not setup.beta),
        "offload_reward is on, but there is no reward model; remove it, or name one: --reward-model":
            setup.offload_reward and setup.reward_model is None,
        f"dtype {setup.dtype!r}: choose bfloat16, float16 or float32":
            setup.dtype not in ("bfloat16", "float16", "float32"),
        "fp16 and bf16 are both on, and a training has one of them; leave out bf16": setup.fp16 and setup.bf16,
        "fp16 needs a GPU; on a CPU set fp16: false, bf16: true": setup.fp16 and setup.device == "cpu",
        "fp16 does not train float16 weights: torch's GradScaler refuses their gradients; dtype must be float32":
            setup.fp16 and setup.dtype == "float16" and not setup.lora_rank and not setup.keeps_float32,
        "activation_offloading takes activations from a GPU to the host; on a CPU set it to false":
            setup.activation_offloading and setup.device == "cpu",
        f"ZeRO stage {setup.zero_stage} has no formula; 2 and 3 have one": setup.zero_stage not in (0, 2, 3),
        f"{setup.weight_bits}-bit weights have no formula where FSDP2 shards them; plan 16 bits, or DDP":
            setup.weight_bits < 16 and setup.fully_sharded,
        f"lora_dropout is {setup.lora_dropout}: completions that share a prompt would share its dropout; set 0.0":
            setup.prefix_sharing and setup.lora_rank and setup.lora_dropout,
        f"{setup.generation_rows} completions ({k_called} {k}) of {length} tokens in a rollout: the planner takes up "
        f"to {MOST_TOKENS:,} tokens": setup.generation_rows * length > MOST_TOKENS,
    }  # fmt: skip
    wrong = [
        *(reason for reason, applies in reasons.items() if applies),
        wrong_on_cpu() if setup.device == "cpu" and setup.lm_head == lm_head_here() else None,
        too_long(setup, hf_config, called),
        share_too_small(setup, hf_config),
        wrong_images(setup, hf_config, prompt_called) if setup.images else None,
    ]
    if said := "; ".join(filter(None, wrong)):
        raise ConfigError(said)
