"""What sharing is worth: the phases of a step over prompts and completions of many lengths, beside the counted limit.

    python -m experiments.evidence.worth [--models narrow,wide] [--cells 3000x100,1000x1000] [--k 8] [--repeats 2]

Whole rows (TRL 1.16.0's own pass with the LM head that scores only completions, as stock has it on a GPU) against
prefix sharing with all completions together, two a pass, or two a micro-batch, alternating in one process. `narrow` is
the bench's model, `wide` has the width of Qwen3-0.6B, two of its layers and a fourteenth of its vocabulary.

Writes one row a repeat to results/<machine>/worth.csv: wall and CPU seconds of each phase, and the limit of any exact
method for scoring and training: multiplications that whole rows take over those that are needed when the prompt is
computed once (see `Work`). Memory is not measured here: malloc keeps what is freed, so that no way pays the system for
its pages again.
"""

import os
import re
import statistics
import sys
from dataclasses import dataclass

from experiments.builds import use_fork
from experiments.evidence.common import FACTS, Parser, Table, place, whole, words
from experiments.evidence.group import PHASES, WAYS, Group, Sizes
from experiments.run_device import keep_freed_memory
from rloo_memory.arms import ARMS
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.models import shape_config

LIMITED = ("score", "train")  # decoding is bound by what it reads, not by multiplications
COLUMNS = (
    "model", "prompt_tokens", "completion_tokens", "k", "way", "repeat",
    *(f"{phase}_{clock}" for clock in ("seconds", "cpu_seconds") for phase in PHASES),
    *(f"{phase}_limit" for phase in LIMITED), *FACTS,
)  # fmt: skip
MODELS = {  # shape, vocabulary, layers
    "narrow": ("qwen3-8-layers", 32_768, 8),
    "wide": ("qwen3-0.6b", 10_852, 2),
}
CELLS = "3000x100,3000x1000,1000x100,1000x1000,200x100,200x1000"


@dataclass(frozen=True)
class Work:
    """Multiplications of a pass over `tokens` tokens whose queries meet `pairs` keys in all, `scored` of them scored.

    Linear layers, attention and LM head are counted. Training computes each layer (but its last product) and each tile
    of the LM head again in the backward, and takes two products there for one in the forward. Attention takes five for
    the two of the forward (FlashAttention-2, section 3.1), after it was computed again with the layer. That of the
    prompt's last layer only keys and values are needed is left out: it is one layer of many in a real model.
    """

    tokens: int
    pairs: int
    scored: int

    @classmethod
    def of(cls, sizes: Sizes, shared: bool) -> "Work":
        """Of k rows; with the prompt in one of them if `shared`, and the completions behind it."""
        rows_of_prompts = 1 if shared else sizes.k
        scored = sizes.k * sizes.completion
        own = sizes.completion * (sizes.completion + 1) // 2
        pairs = rows_of_prompts * sizes.prompt * (sizes.prompt + 1) // 2 + scored * sizes.prompt + sizes.k * own
        return cls(rows_of_prompts * sizes.prompt + scored, pairs, scored)

    def multiplications(self, config, phase: str) -> float:
        """Of a Qwen3 model in "score" or "train"."""
        query, key = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        last = self.tokens * config.num_hidden_layers * config.hidden_size * config.intermediate_size
        in_linear = 3 * last + self.tokens * config.num_hidden_layers * config.hidden_size * 2 * (query + key)
        in_attention = self.pairs * config.num_hidden_layers * 2 * query
        in_head = self.scored * config.vocab_size * config.hidden_size
        if phase == "score":
            return in_linear + in_attention + in_head
        return 4 * in_linear - last + 4.5 * in_attention + 4 * in_head


def limit(config, sizes: Sizes, phase: str) -> float:
    """How many times faster than whole rows an exact method can be that is bound by multiplications."""
    return Work.of(sizes, False).multiplications(config, phase) / Work.of(sizes, True).multiplications(config, phase)


def model_config(name: str):
    shape, vocab_size, layers = MODELS[name]
    config = shape_config(shape, vocab_size)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return config


def read_cell(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not found or not 2 <= int(found[1]) <= 100_000 or not 1 <= int(found[2]) <= 100_000:
        raise ConfigError(
            f"--cells {text[:40]!r}: write prompt x completion tokens, like 3000x100, up to 100,000 each"
        )
    return int(found[1]), int(found[2])


def run(argv: list[str] | None) -> int:
    parser = Parser("worth", __doc__, cpu_only=True)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--cells", default=CELLS, help=f"prompt x completion tokens; default {CELLS}")
    parser.add_argument("--k", type=whole(2, 1000), default=8)
    parser.add_argument("--repeats", type=whole(1, 100), default=2)
    args = parser.parse_args(argv)
    names = words("model", args.models, MODELS)
    cells = cells_of(args.cells, names, lambda cell: Sizes(*read_cell(cell), args.k))
    here = place(args)
    use_fork(ARMS["shared"])
    table = Table(here.folder / "worth.csv", COLUMNS, here.facts, args.fresh)
    for number, (name, sizes) in enumerate(cells, start=1):
        print(f"{number} of {len(cells)}: {name}, prompt {sizes.prompt}, completions {sizes.completion}", flush=True)
        measure(name, sizes, args.repeats, table)
    table.finish()
    print(os.path.relpath(table.path))
    return 0


def cells_of(option: str, names: list[str], read) -> list[tuple]:
    """Each of the comma-separated cells with each of the models. Raises `ConfigError` where one is named twice."""
    cells = [(name, read(cell)) for cell in option.split(",") for name in names]
    if len(set(cells)) < len(cells):
        raise ConfigError(f"--cells {option} names a cell twice; name it once")
    return cells


def cell_of(name: str, sizes: Sizes) -> dict:
    """The columns that say which cell a row is of."""
    return {"model": name, "prompt_tokens": sizes.prompt, "completion_tokens": sizes.completion, "k": sizes.k}


def measure(name: str, sizes: Sizes, repeats: int, table: Table) -> None:
    """Brings the table to `repeats` rows of each way for one cell, and prints how many times faster sharing is."""
    from transformers import AutoModelForCausalLM

    config = model_config(name)
    cell = cell_of(name, sizes)
    missing = table.missing(WAYS, repeats, **cell)
    if missing:
        group = Group(AutoModelForCausalLM.from_config(config), config.vocab_size, sizes)
        keep_freed_memory()
        for way in ("whole", "shared"):  # warms up
            group.train(way)
        limits = {f"{phase}_limit": round(limit(config, sizes, phase), 3) for phase in LIMITED}
        for repeat, way in missing:
            row = group.measure(way)
            table.add({**cell, "way": way, "repeat": repeat, **row, **limits})
            print(f"  {way}: {repeat + 1} of {repeats}, {sum(row[f'{x}_seconds'] for x in PHASES):.1f} s", flush=True)
    mine = table.rows_with(**cell)
    for way in list(WAYS)[1:]:
        faster = [median(mine, "whole", phase) / median(mine, way, phase) for phase in PHASES]
        phases = ", ".join(f"{phase} {x:.2f} x" for phase, x in zip(PHASES, faster, strict=True))
        limits = " and ".join(mine[0][f"{phase}_limit"] for phase in LIMITED)
        print(f"  {way}: {phases} (limit of score and train: {limits})")


def median(rows: list[dict[str, str]], way: str, phase: str) -> float:
    return statistics.median(float(row[f"{phase}_seconds"]) for row in rows if row["way"] == way)


def main(argv: list[str] | None = None) -> int:
    return exit_code("worth", run, argv)


if __name__ == "__main__":
    sys.exit(main())
