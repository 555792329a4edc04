"""Generation, scoring and policy forward/backward of one group on models beyond text transformers, alternating.

    python -m experiments.evidence.families_cost [--families gated-deltanet,mamba-2,images] [--repeats 3]

Whole rows against prefix sharing with all completions together, two a pass, or two a micro-batch: the same narrow
model in float32, gradient checkpointing and compact LM head for each. `gated-deltanet` is Qwen3.5's text model and
`mamba-2` Bamba's, both at a prompt of 3,000 and completions of 100; `images` is Qwen2.5-VL's architecture at a prompt
of 1,024 image tokens (4,096 patches) and 200 of text. The operators are PyTorch's own: there are no kernels for
recurrent layers on a CPU.

Writes one row a repeat to results/<machine>/families/<family>.csv: seconds and peak resident bytes above the level
before of each phase, how many images went through the vision tower in all three, and the relative difference of all
parameters' gradients from those of whole rows. A process measures peaks once, before any time: for times, malloc keeps
what is freed.
"""

import os
import statistics
import sys

from experiments.builds import use_fork
from experiments.evidence.common import FACTS, Parser, Place, Table, place, whole, words
from experiments.evidence.group import PHASE_COLUMNS, PHASES, WAYS, Group, Image, Sizes
from experiments.run_device import keep_freed_memory
from rloo_memory.arms import ARMS
from rloo_memory.errors import exit_code
from rloo_memory.models import shape_config
from rloo_memory.phases import HighWater

COLUMNS = (
    "way", "repeat", *PHASE_COLUMNS, "images_encoded", "gradient_difference", "family", "prompt_tokens",
    "completion_tokens", "k", *FACTS,
)  # fmt: skip
VOCAB, LAYERS, HIDDEN = 32_000, 8, 256
IMAGE = Image(side=64, token=3)
TEXT = 200
SHAPES_OF = {"gated-deltanet": "qwen3.5-8-layers", "mamba-2": "bamba-8-layers"}
SIZES = {
    "gated-deltanet": Sizes(3000, 100, 8),
    "mamba-2": Sizes(3000, 100, 8),
    "images": Sizes(IMAGE.side**2 // 4 + TEXT, 100, 8),
}


def build_model(family: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    if family in SHAPES_OF:
        return AutoModelForCausalLM.from_config(shape_config(SHAPES_OF[family], VOCAB))
    # As in Qwen2.5-VL 3B, the tower has about three quarters of the text model's multiplications on such a prompt
    vision = dict(
        depth=2, fullatt_block_indexes=[1], hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, out_hidden_size=HIDDEN,
        num_heads=4,
    )  # fmt: skip
    text = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]),
    )  # fmt: skip
    special = dict(image_token_id=IMAGE.token, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision, **special)
    return AutoModelForImageTextToText.from_config(config)


def run(argv: list[str] | None) -> int:
    parser = Parser("families_cost", __doc__, cpu_only=True)
    parser.add_argument("--families", default=",".join(SIZES), help=f"some of {', '.join(SIZES)}")
    parser.add_argument("--repeats", type=whole(1, 100), default=3)
    args = parser.parse_args(argv)
    families = words("family", args.families, SIZES)
    here = place(args)
    (here.folder / "families").mkdir(exist_ok=True)
    use_fork(ARMS["shared"])
    tables = {family: table_of(family, here, args.fresh) for family in families}
    peaks = {}
    for family, table in tables.items():  # all before any time
        if table.missing(WAYS, args.repeats):
            print(f"{family}: peaks", flush=True)
            group, high_water = group_of(family), HighWater("cpu")
            peaks[family] = {way: group.peaks(way, high_water) for way in WAYS}
    keep_freed_memory()
    for number, (family, table) in enumerate(tables.items(), start=1):
        print(f"{family}, {number} of {len(families)}", flush=True)
        measure(family, table, args.repeats, peaks.get(family, {}))
    return 0


def table_of(family: str, here: Place, fresh: bool) -> Table:
    """results/<machine>/families/<family>.csv"""
    sizes = SIZES[family]
    facts = {"family": family, "prompt_tokens": sizes.prompt, "completion_tokens": sizes.completion, "k": sizes.k}
    return Table(here.folder / "families" / f"{family}.csv", COLUMNS, {**facts, **here.facts}, fresh)


def group_of(family: str) -> Group:
    return Group(build_model(family), VOCAB, SIZES[family], IMAGE if family == "images" else None)


def measure(family: str, table: Table, repeats: int, peaks: dict[str, dict]) -> None:
    """Brings the table to `repeats` rows of each way, and prints their medians."""
    missing = table.missing(WAYS, repeats)
    if missing:
        group = group_of(family)
        group.train("shared")  # warms up, as the next
        group.train("whole")
        truth = group.gradient()
        for repeat, way in missing:
            row = group.measure(way) | peaks[way]
            difference = (group.gradient() - truth).norm() / truth.norm()
            row |= {"images_encoded": group.encoded, "gradient_difference": f"{difference.item():.2e}"}
            table.add({"way": way, "repeat": repeat, **row})
            print(f"{way}: {repeat + 1} of {repeats}, {sum(row[f'{x}_seconds'] for x in PHASES):.1f} s", flush=True)
    table.finish()
    for way in WAYS:
        mine = [row for row in table.rows if row["way"] == way]
        medians = {
            name: statistics.median(float(row[name]) for row in mine) for name in (*PHASE_COLUMNS, "images_encoded")
        }
        phases = "   ".join(
            f"{x} {medians[f'{x}_seconds']:6.2f} s, {medians[f'{x}_peak_bytes'] / 2**20:6.0f} MiB" for x in PHASES
        )
        print(f"{way:9} {phases}   {medians['images_encoded']:.0f} images")
    print(os.path.relpath(table.path))


def main(argv: list[str] | None = None) -> int:
    return exit_code("families_cost", run, argv)


if __name__ == "__main__":
    sys.exit(main())
