"""Tables of what is checked on a device, and of the emulated CUDA device, which is no GPU."""

from pathlib import Path

import pandas as pd

from visualization.results import GIB
from visualization.tables.text import joined, markdown, measured_on, signed

TREES = {"untouched": "pass with TRL as released", "called": "`share_prompts` called"}  # column -> heading
COUNTS = ("launches_a_layer", "launches_outside_layers", "waits")


def exactness(folder: Path) -> str:
    """Errors of log-probabilities and gradients against float64."""
    rows = pd.read_csv(folder / "exactness.csv", dtype=str, keep_default_na=False)
    shown = rows.drop(columns=["device_kind", "device_name", "torch_version", "transformers_version", "commit"])
    table = markdown([name.replace("_", " ") for name in shown], shown.to_numpy(), texts=len(shown.columns))
    return f"{measured_on(rows)}\n\nRelative errors against float64:\n\n{table}\n"


def upstream(folder: Path) -> str:
    """How many of TRL's own tests pass, and why the others do not."""
    rows = pd.read_csv(folder / "upstream_tests.csv", keep_default_na=False)
    rows["trainer"] = rows.test.str.extract(r"test_(\w+)_trainer", expand=False).str.upper()
    passing = rows[rows.untouched == "passed"]
    passed = passing[list(TREES)] == "passed"
    tests, sums = rows.groupby("trainer", sort=False).size(), passed.groupby(passing.trainer).sum()
    counts = [[trainer, *map(str, [tests[trainer], *sums.loc[trainer]])] for trainer in tests.index]
    differ = passing[~passed.all(axis=1)]
    reasons = differ.reason.str.split(r"[:.] ", regex=True).str[:2].str.join(": ")
    names = differ.trainer + ", `" + differ.test.str.rpartition(".")[2] + "`"
    header = ["", "tests", *TREES.values()]
    return (
        f"{measured_on(rows)}\n\nTRL's repository at {rows.tests_commit.iloc[0]}, with tiny models made on the "
        "spot. Tests that pass with TRL as released, and of these how many pass otherwise:\n\n"
        + f"{markdown(header, counts)}\n\n"
        + markdown(["does not pass with shared prompts", "why"], zip(names, reasons, strict=True), texts=2)
        + "\n"
    )


def emulated(folder: Path) -> str:
    """torch's own allocator beside the planner, and the share of what comes and goes that it reserves beyond what is
    allocated."""
    rows, table = pd.read_csv(folder / "planner.csv"), []
    rows["share"] = (rows.reserved_bytes - rows.allocated_bytes) / rows.comes_and_goes_bytes
    for case, mine in rows.sort_values("expandable_segments", kind="stable").groupby("case", sort=False):
        cells = [f"`{case}`", f"{mine.predicted_bytes.iloc[0] / GIB:.2f}"]
        for row in mine.itertuples():
            error = signed(row.predicted_bytes / row.allocated_bytes - 1).replace(" %", "%")
            cells += [f"{row.allocated_bytes / GIB:.2f} ({error})", f"{row.reserved_bytes / GIB:.2f}"]
            cells.append(f"{row.share:.2f}")
        table.append(cells)
    header = ["case", "predicted", "allocated", "reserved", "share", "expandable: allocated", "reserved", "share"]
    first, (fixed, expandable) = rows.iloc[0], rows.groupby("expandable_segments").share.median()
    return (
        f"*Emulated, no GPU: torch {first.torch_version}, transformers {first.transformers_version}; prompts of "
        f"{first.prompt_tokens:,} tokens, completions of {first.completion_tokens}; GiB of the highest phase; "
        f"commit {joined(rows.commit.str[:10])}*\n\n"
        f"{markdown(header, table)}\n\nMedian of the shares: {fixed:.2f}, with expandable segments {expandable:.2f}.\n"
    )


def launches(folder: Path) -> str:
    """Kernel launches of one update."""
    rows = pd.read_csv(folder / "launches.csv")
    table = [[row.way, *(f"{getattr(row, name):,}" for name in COUNTS)] for row in rows.itertuples()]
    header = ["k = 8 completions", "kernels a layer", "kernels outside layers", "waits for the device"]
    return f"*Emulated, no GPU: counted in one update, forward and backward*\n\n{markdown(header, table)}\n"
