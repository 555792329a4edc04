"""What a plan predicts: each phase's peak and what it is made of.

python -m visualization.charts.plan PLAN.json OUT.png
"""

import json
from pathlib import Path

import pandas as pd
from matplotlib.artist import setp
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style
from visualization.results import GIB

# Okabe-Ito, and hatches that tell the kinds apart in grey print
KINDS = {
    "parameters": ("#0072B2", ""), "reference": ("#56B4E9", "//"), "reward model": ("#332288", "||"),
    "gradients": ("#D55E00", "\\\\"), "optimizer state": ("#E69F00", "xx"), "KV cache": ("#CC79A7", ".."),
    "images": ("#882255", "++"), "activations": ("#009E73", ""), "logits": ("#F0E442", "--"),
    "other": ("#7F7F7F", "oo"),
}  # fmt: skip


def chart(path: Path) -> Figure:
    """Stacked bars of what `rloo-memory plan --json` wrote: one panel an arm, one bar a phase."""
    result = json.loads(path.read_text())
    setup, limit = result["predictions"][0]["setup"], result["device_memory_bytes"]
    rows = {
        (plan["arm"], phase["phase"]): phase["kinds"] for plan in result["predictions"] for phase in plan["phases"]
    }
    sizes = pd.DataFrame(rows).div(GIB).fillna(0).groupby(lambda kind: kind if kind in KINDS else "other").sum()
    sizes = sizes.reindex(list(KINDS)).dropna().T
    looks = [{"facecolor": KINDS[kind][0], "hatch": KINDS[kind][1], "edgecolor": "white"} for kind in sizes]
    shown = " and ".join(f"{width}x{height}" for width, height in setup.get("images", ()))  # older plans have none
    title = (
        f"{result['model']}: prompt {setup['prompt_tokens']:,}{f' with {shown}' if shown else ''}, "
        f"completion {setup['max_completion_length']:,}, k = {setup['num_generations']}"
    )
    small_print = ["Predicted, not measured. " + result["versions"]]
    if limit:
        small_print.append(f"The dashed line is the device memory less the reserve: {limit / GIB:.1f} GiB.")
    handles = [Patch(**look, label=kind) for kind, look in zip(sizes, looks, strict=True)]
    figure = style.new_figure(9, 4, title, small_print, handles, columns=7)
    arms = sizes.index.unique(0)
    for axes, arm in zip(figure.subplots(1, len(arms), sharey=True, squeeze=False)[0], arms, strict=True):
        sizes.loc[arm].plot.bar(stacked=True, ax=axes, width=0.8, rot=30, legend=False, linewidth=0)
        for bars, look in zip(axes.containers, looks, strict=True):
            setp(bars, **look)
        totals = sizes.loc[arm].sum(axis=1)
        axes.bar_label(axes.containers[-1], [f"{total:.1f}" for total in totals], fontsize=8)
        if limit:
            axes.axhline(limit / GIB, color="black", linestyle=(0, (5, 3)), linewidth=1.2)
        axes.set(title=arm, xlabel="")
        axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.12 * max(sizes.sum(axis=1).max(), (limit or 0) / GIB))
    figure.axes[0].set_ylabel("predicted peak allocated (GiB)")
    return figure


if __name__ == "__main__":
    style.draw_one(__doc__, chart)
