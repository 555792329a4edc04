"""Which real shapes are measured, how, and in which order."""

from dataclasses import dataclass, replace
from functools import cached_property

from rloo_memory.models import shape_config
from rloo_memory.plan.setups import Setup

VOCABULARY = 151_936
# Ways to train. A number is completions or, if it is larger than k, tokens that go through the model together; with
# `micro`, completions of a micro-batch
WAYS = (
    "stock", "stock-cudnn", "stock-accumulate", "shared-2", "shared-micro-2", "shared-4096", "shared-8192",
    "shared-all", "shared-2-mask", "stock-offload", "shared-2-offload",
)  # fmt: skip
OF_EVERY_CELL = WAYS[:8]


@dataclass(frozen=True)
class Cell:
    """A model, lengths in tokens, k completions, where these come from (`sampled`, `given`, `ragged`), and the way."""

    model: str
    lora_rank: int
    prompt_tokens: int
    completion_tokens: int
    k: int
    completions: str
    way: str
    device: str = "cuda"
    vocab_size: int = VOCABULARY

    @property
    def row(self) -> dict:
        """As the columns of the table have it."""
        names = ("model", "lora_rank", "prompt_tokens", "completion_tokens", "k", "completions", "way")
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str:
        """What decides the planner's prediction."""
        lengths = "ragged" if self.completions == "ragged" else "equal"
        way = "stock" if self.with_cudnn else self.way.removesuffix("-mask")
        tokens = f"p{self.prompt_tokens}-c{self.completion_tokens}-k{self.k}"
        return f"{self.model}-lora{self.lora_rank}-{tokens}-{lengths}-{way}"

    @property
    def shares(self) -> bool:
        return self.way.startswith("shared")

    @property
    def with_cudnn(self) -> bool:
        return self.way == "stock-cudnn"

    @property
    def with_mask(self) -> bool:
        return self.way.endswith("-mask")

    @cached_property
    def setup(self) -> Setup:
        """What the trainer is asked for, and what the planner predicts."""
        half = self.device == "cuda"
        base = Setup(
            prompt_tokens=self.prompt_tokens,
            max_completion_length=self.completion_tokens,
            num_generations=self.k,
            per_device_train_batch_size=self.k,
            dtype="bfloat16" if half else "float32",
            bf16=half,
            lora_rank=self.lora_rank,
            activation_offloading=self.way.endswith("-offload"),
            padded=self.completions == "ragged",
            device=self.device,
        )
        if not self.shares:
            return base.arm("stock-accumulate" if self.way == "stock-accumulate" else "stock")
        passes = self.way.split("-")[1]
        if passes == "all":
            return replace(base, prefix_sharing=True)
        if passes == "micro":
            return replace(base.with_rows(int(self.way.split("-")[2])), prefix_sharing=True)
        number = int(passes)  # of completions, or of tokens
        setup = base.with_passes(number) if number <= self.k else replace(base, tokens_per_forward=number)
        return setup.arm("shared")

    def hf_config(self, tokenizer=None):
        config = shape_config(self.model, self.vocab_size)
        if tokenizer is not None:
            config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        return config

    def __str__(self) -> str:
        lora = f" LoRA {self.lora_rank}" if self.lora_rank else ""
        return (
            f"{self.model}{lora}, prompt {self.prompt_tokens}, {self.completions} completions of "
            f"{self.completion_tokens}, k {self.k}, {self.way}"
        )


@dataclass(frozen=True)
class Plan:
    """Cells in order. Each is visited `visits` times, alternating, and each visit measures `steps` steps. `stated_s`
    is what a visit may take until one like it was made."""

    cells: tuple[Cell, ...]
    visits: int = 1
    steps: int = 2
    stated_s: float = 40.0


SHAPES = (("qwen3-0.6b", 0), ("qwen3-8b", 16))
LENGTHS = {(3000, 100): "sampled", (1000, 2000): "given"}  # 2,000 tokens take a minute to sample


def cells(lengths: tuple[int, int], k: int, completions: str, ways=OF_EVERY_CELL, shapes=SHAPES) -> tuple[Cell, ...]:
    return tuple(Cell(*shape, *lengths, k, completions, way) for shape in shapes for way in ways)


RIVALS = ("stock", "stock-cudnn", "shared-2", "shared-8192")
ON_CPU = {"device": "cpu", "vocab_size": 2000}
SMALL = ("tiny-qwen3", 0, 48, 8, 4)
PLANS = {
    "first": Plan(cells((3000, 100), 8, "sampled", shapes=SHAPES[:1]), visits=3, steps=1),
    "k8": Plan(
        cells((3000, 100), 8, "sampled", shapes=SHAPES[1:])
        + cells((1000, 2000), 8, "given")
    ),
    "ragged": Plan(sum((cells(x, 8, "ragged", RIVALS) for x in LENGTHS), ())),
    "k32": Plan(sum((cells(x, 32, kind) for x, kind in LENGTHS.items()), ()), steps=1, stated_s=60),
    "long-sampled": Plan(cells((1000, 2000), 8, "sampled", ("shared-8192", "stock")), steps=1, stated_s=150),
    "mask-offload": Plan(
        cells((3000, 100), 8, "given", ("shared-2-mask", "stock-offload", "shared-2-offload"))
        + cells((1000, 2000), 8, "given", ("stock-offload", "shared-2-offload"))
    ),
    "small": Plan(
        (
            *(Cell(*SMALL, "sampled", way, **ON_CPU) for way in ("stock", "shared-2", "shared-4096")),
            Cell(*SMALL, "sampled", "shared-micro-2", **ON_CPU),
            *(Cell(*SMALL, "ragged", way, **ON_CPU) for way in ("stock-accumulate", "shared-all", "shared-2-mask")),
            Cell(SMALL[0], 4, *SMALL[2:], "given", "shared-2", **ON_CPU),
        ),
        steps=1,
        stated_s=20,
    ),
}  # fmt: skip
