"""Tables of the emulated CUDA device: torch's own allocator beside the planner, and kernel launches. Not a GPU's."""

from pathlib import Path

from visualization.files import read_csv
from visualization.pages.lines import markdown
from visualization.runs import GIB

SIZES = ("predicted_bytes", "allocated_bytes", "reserved_bytes", "comes_and_goes_bytes")
COUNTS = ("launches_a_layer", "launches_outside_layers", "waits")


def emulated_table(folder: Path) -> str:
    """From planner.csv in results/emulated-cuda. Raises LoadError."""
    remedy = "run .venv-cuda/bin/python tests/cuda/planner.py"
    rows = read_csv(folder / "planner.csv", (*SIZES, "prompt_tokens", "completion_tokens"), remedy)
    rows["expandable"] = rows.expandable_segments.astype(str) == "True"
    rows["share"] = (rows.reserved_bytes - rows.allocated_bytes) / rows.comes_and_goes_bytes
    table = []
    for case, mine in rows.sort_values("expandable", kind="stable").groupby("case", sort=False):
        cells = [f"`{case}`", f"{mine.predicted_bytes.iloc[0] / GIB:.2f}"]
        for row in mine.itertuples():
            error = f"{row.predicted_bytes / row.allocated_bytes - 1:+.1%}".replace("-", "−")
            cells += [f"{row.allocated_bytes / GIB:.2f} ({error})", f"{row.reserved_bytes / GIB:.2f}"]
            cells.append(f"{row.share:.2f}")
        table.append(cells)
    header = ["case", "predicted", "allocated", "reserved", "share", "expandable: allocated", "reserved", "share"]
    first, (fixed, expandable) = rows.iloc[0], rows.groupby("expandable").share.median()
    return (
        f"*Emulated, no GPU: torch {first.torch_version}, transformers {first.transformers_version}; prompts of "
        f"{first.prompt_tokens:,} tokens, completions of {first.completion_tokens}; GiB of the highest phase*\n\n"
        + "\n".join(markdown(header, table))
        + f"\n\nMedian of the shares: {fixed:.2f}, with expandable segments {expandable:.2f}.\n"
    )


def launches_table(folder: Path) -> str:
    """From launches.csv in results/emulated-cuda. Raises LoadError."""
    rows = read_csv(folder / "launches.csv", COUNTS, "run make test-cuda")
    table = [[row.way, *(f"{getattr(row, name):,.0f}" for name in COUNTS)] for row in rows.itertuples()]
    header = ["k = 8 completions", "kernels a layer", "kernels outside layers", "waits for the device"]
    caption = "*Emulated, no GPU: counted in one update, forward and backward*"
    return "\n".join([caption, "", *markdown(header, table)]) + "\n"
