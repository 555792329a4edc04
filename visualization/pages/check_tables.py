"""Tables of what is checked on a device (exactness.csv, kernels.csv, upstream_tests.csv), and of the emulated CUDA
device, which is no GPU: torch's own allocator beside the planner, and kernel launches."""

from pathlib import Path

import pandas as pd

from visualization.files import read_csv, read_rows
from visualization.pages.lines import markdown
from visualization.pages.side_by_side import measured_on
from visualization.runs import GIB

SIZES = ("predicted_bytes", "allocated_bytes", "reserved_bytes", "comes_and_goes_bytes")
TREES = ("untouched", "off", "forced")
COUNTS = ("launches_a_layer", "launches_outside_layers", "waits")


def exactness_table(folder: Path) -> str:
    """Errors of log-probabilities and gradients against float64, from exactness.csv. Raises LoadError."""
    numbers = ("log_prob_error", "gradient_error", "prompt_tokens", "completion_tokens", "k")
    rows = read_rows(folder / "exactness.csv", numbers, "experiments.checks.exactness")
    first = rows.iloc[0]
    intro = (
        f"{first['shape']}, random weights, a prompt of P tokens, k completions of up to C. Relative errors against "
        "the same weights in float64:"
    )
    header = ["weights", "P", "C", "k", "", "log-probabilities", "gradient", "attention"]
    cells = [
        [
            *(row.precision, f"{row.prompt_tokens:,.0f}", f"{row.completion_tokens:,.0f}", f"{row.k:.0f}", row.way),
            *(f"{row.log_prob_error:.1e}", f"{row.gradient_error:.1e}", f"`{row.attention}`"),
        ]
        for row in rows.itertuples()
    ]
    return page(rows, intro, header, cells)


def kernels_table(folder: Path) -> str:
    """Errors of the attention kernels by themselves, the largest of each setting and dtype, from kernels.csv. Raises
    LoadError."""
    numbers = ("error", "masked_error", "heads", "key_heads")
    rows = read_csv(folder / "kernels.csv", numbers, "run python -m experiments.checks.kernels")
    intro = (
        "Attention to a shared prompt by itself, the largest relative error against float64 of output and gradients:"
    )
    header = ["", "heads", "dtype", "prefix sharing", "sdpa with a mask", "verdict"]
    cells = []
    for (setting, dtype), mine in rows.groupby(["setting", "dtype"], sort=False):
        wrong = [f"{row.tensor}: {row.verdict}" for row in mine.itertuples() if row.verdict != "ok"]
        errors = ["" if pd.isna(size) else f"{size:.1e}" for size in (mine.error.max(), mine.masked_error.max())]
        failed = mine.masked_verdict[mine.masked_verdict != "ok"].unique()
        errors[1] = "; ".join(filter(None, [errors[1], *failed]))
        heads = f"{mine.heads.iloc[0]:.0f} / {mine.key_heads.iloc[0]:.0f}"
        cells.append([setting, heads, dtype, *errors, "; ".join(wrong) or "ok"])
    return page(rows, intro, header, cells)


def upstream_table(folder: Path) -> str:
    """How many of TRL's own tests pass, from upstream_tests.csv, and why the others do not. Raises LoadError."""
    rows = read_rows(folder / "upstream_tests.csv", (), "experiments.checks.upstream_tests TRL")
    rows["trainer"] = rows.test.str.extract(r"test_(\w+)_trainer", expand=False).str.upper()
    passing = rows[rows.untouched == "passed"]
    counts = [
        [trainer, str(len(mine)), *(str((mine[mine.untouched == "passed"][tree] == "passed").sum()) for tree in TREES)]
        for trainer, mine in rows.groupby("trainer", sort=False)
    ]
    intro = (
        f"TRL's repository at {rows.tests_commit.iloc[0]}, with tiny models made on the spot. Tests that pass with "
        "TRL as released, and of these with the fork:"
    )
    header = ["", "tests", "pass with TRL as released", "options off", "prefix sharing forced on"]
    differ = passing[passing.forced != "passed"]
    reasons = differ.reason.str.split(r"[:.] ", regex=True).str[:2].str.join(": ")
    names = differ.trainer + ", `" + differ.test.str.rpartition(".")[2] + "`"
    why = [list(pair) for pair in zip(names, reasons, strict=True)]
    not_passed = "\n".join(markdown(["does not pass with sharing forced on", "why"], why))
    return f"{page(rows, intro, header, counts)}\n{not_passed}\n"


def page(rows: pd.DataFrame, intro: str, header: list[str], cells: list[list[str]]) -> str:
    return "\n".join([f"*{measured_on(rows)}*", "", intro, "", *markdown(header, cells)]) + "\n"


def emulated_shares(folder: Path) -> pd.DataFrame:
    """planner.csv in results/emulated-cuda, with the share of what comes and goes that is reserved beyond what is
    allocated. Raises LoadError."""
    remedy = "run .venv-cuda/bin/python tests/cuda/planner.py"
    rows = read_csv(folder / "planner.csv", (*SIZES, "prompt_tokens", "completion_tokens"), remedy)
    share = (rows.reserved_bytes - rows.allocated_bytes) / rows.comes_and_goes_bytes
    return rows.assign(expandable=rows.expandable_segments == "True", share=share)


def emulated_table(folder: Path) -> str:
    """From planner.csv in results/emulated-cuda. Raises LoadError."""
    rows, table = emulated_shares(folder), []
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
