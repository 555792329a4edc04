"""Generation with a shared prompt beside stock's, over prompts and completions of many lengths.

    python -m experiments.evidence.decoding [--models wide] [--cells 100x64x8,2000x256x32] [--repeats 2]

A cell is prompt x completion tokens x k. Rows with a cache of their own (transformers' `generate`, as TRL calls it)
against one cache that holds the prompt once, alternating in one process. The models are those of
`experiments.evidence.worth`, and malloc keeps what is freed, as there. Writes one row a repeat to
results/<machine>/decoding.csv: wall and CPU seconds.
"""

import os
import re
import sys

from experiments.builds import use_fork
from experiments.evidence.common import FACTS, Parser, Table, place, whole, words
from experiments.evidence.group import Group, Sizes
from experiments.evidence.worth import MODELS, cell_of, cells_of, median, model_config
from experiments.run_device import keep_freed_memory
from rloo_memory.arms import ARMS
from rloo_memory.errors import ConfigError, exit_code

WAYS = ("whole", "shared")
COLUMNS = (
    "model", "prompt_tokens", "completion_tokens", "k", "way", "repeat", "generate_seconds", "generate_cpu_seconds",
    *FACTS,
)  # fmt: skip
CELLS = "100x64x8,100x64x32,100x2048x8,1000x400x32,2000x256x8,8000x64x8,8000x64x32,8000x512x8"


def read_cell(text: str) -> Sizes:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,4})", text)
    sizes = Sizes(*map(int, found.groups())) if found else None
    if not sizes or not (2 <= sizes.prompt <= 100_000 and 1 <= sizes.completion <= 100_000 and 2 <= sizes.k <= 1000):
        raise ConfigError(
            f"--cells {text[:40]!r}: write prompt x completion tokens x k, like 2000x256x8; up to 100,000 tokens "
            "each, k from 2 to 1,000"
        )
    return sizes


def run(argv: list[str] | None) -> int:
    parser = Parser("decoding", __doc__, cpu_only=True)
    parser.add_argument("--models", default="wide", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--cells", default=CELLS, help=f"prompt x completion tokens x k; default {CELLS}")
    parser.add_argument("--repeats", type=whole(1, 100), default=2)
    args = parser.parse_args(argv)
    names = words("model", args.models, MODELS)
    cells = cells_of(args.cells, names, read_cell)
    here = place(args)
    use_fork(ARMS["shared"])
    table = Table(here.folder / "decoding.csv", COLUMNS, here.facts, args.fresh)
    for number, (name, sizes) in enumerate(cells, start=1):
        about = f"prompt {sizes.prompt:,}, completions {sizes.completion:,}, k = {sizes.k}"
        print(f"{number} of {len(cells)}: {name}, {about}", flush=True)
        measure(name, sizes, args.repeats, table)
    table.finish()
    print(os.path.relpath(table.path))
    return 0


def measure(name: str, sizes: Sizes, repeats: int, table: Table) -> None:
    """Brings the table to `repeats` rows of each way for one cell, and prints how many times faster sharing is."""
    from transformers import AutoModelForCausalLM

    config = model_config(name)
    cell = cell_of(name, sizes)
    missing = table.missing(WAYS, repeats, **cell)
    if missing:
        model = AutoModelForCausalLM.from_config(config)
        keep_freed_memory()
        for way in WAYS:  # warms up
            Group(model, config.vocab_size, Sizes(sizes.prompt, 2, sizes.k)).generate(way)
        group = Group(model, config.vocab_size, sizes)
        for repeat, way in missing:
            row = group.measure(way, phases=("generate",))
            table.add({**cell, "way": way, "repeat": repeat, **row})
            print(f"  {way}: {repeat + 1} of {repeats}, {row['generate_seconds']:.1f} s", flush=True)
    whole, shared = (median(table.rows_with(**cell), way, "generate") for way in WAYS)
    print(f"  shared: {whole / shared:.2f} x")


def main(argv: list[str] | None = None) -> int:
    return exit_code("decoding", run, argv)


if __name__ == "__main__":
    sys.exit(main())
