"""Published peaks of GPUs beside predictions, from results/published/predicted.csv."""

from pathlib import Path

import pandas as pd

from visualization.files import read_rows
from visualization.pages.lines import commits_in_short, markdown

WORDS = {"out of memory": "card's memory, and it ran out"}


def read_peaks(folder: Path) -> pd.DataFrame:
    """One row a published figure. Raises LoadError."""
    numbers = ("measured_gib", "predicted_bytes", "ratio")
    return read_rows(folder / "predicted.csv", numbers, "experiments.checks.published_peaks")


def within(rows: pd.DataFrame) -> str:
    """How far the allocated peaks that are held are from what is predicted."""
    held = rows[(rows.metric == "allocated") & (rows.not_held == "")]
    sharded = held.card.str.contains("FSDP2")
    near, ratios = held[~sharded].ratio, held[sharded].ratio
    words = f"{len(near)} allocated peaks are {near.min():.3f} to {near.max():.3f} of the prediction, median "
    words += f"{near.median():.3f}"
    return words + (f"; under FSDP2 {', '.join(f'{ratio:.3f}' for ratio in ratios)}" if len(ratios) else "")


def gpu_peaks_table(folder: Path) -> str:
    """Held rows, those of one card, model and metric together; then why others are not held. Raises LoadError."""
    rows = read_peaks(folder)
    held, others = rows[rows.not_held == ""], rows[rows.not_held != ""]
    lines = [f"*{within(rows)}. Commit {commits_in_short(rows.commit)}.*", ""]
    table = []
    for (card, model, trained, metric), mine in held.groupby(["card", "model", "trained", "metric"], sort=False):
        ratios = mine.ratio
        span = f"{ratios.iloc[0]:.3f}" if len(ratios) == 1 else f"{ratios.min():.3f} to {ratios.max():.3f}"
        sizes = sorted(mine.measured_gib)
        size = f"{sizes[0]:.1f}" if len(sizes) == 1 else f"{sizes[0]:.1f} to {sizes[-1]:.1f}"
        what = WORDS.get(metric, metric)
        arms = ", ".join(f"`{arm}`" for arm in mine.arm.unique())
        table.append([card, model.rpartition("/")[2], trained, arms, what, f"{len(mine)}", size, span])
    header = ["card", "model", "trained", "arm", "what was measured", "figures", "GiB", "of the predicted"]
    lines += [*markdown(header, table, 5), "", "Not held:", ""]
    for why, mine in others.groupby("not_held", sort=False):
        lines.append(f"* {len(mine)} figure{'s' if len(mine) > 1 else ''} ({', '.join(mine.card.unique())}): {why}.")
    return "\n".join(lines) + "\n"
