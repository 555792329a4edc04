"""What a plan predicts: each phase's peak and what it is made of.

python -m visualization.charts.plan PLAN.json OUT.png
"""

import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style
from visualization.results import GIB

# Okabe-Ito, and hatches that tell the kinds apart in grey print
KINDS = {
    "parameters": ("#0072B2", ""),
    "reference": ("#56B4E9", "//"),
    "reward model": ("#332288", "||"),
    "gradients": ("#D55E00", "\\\\"),
    "optimizer state": ("#E69F00", "xx"),
    "KV cache": ("#CC79A7", ".."),
    "images": ("#882255", "++"),
    "activations": ("#009E73", ""),
    "logits": ("#F0E442", "--"),
    "other": ("#7F7F7F", "oo"),
}


def chart(path: Path) -> Figure:
    """Stacked bars of what `rloo-memory plan --json` wrote: one group an arm, one bar a phase."""
    result = json.loads(path.read_text())
    setup = result["predictions"][0]["setup"]
    phases = [(plan["arm"], phase) for plan in result["predictions"] for phase in plan["phases"]]
    arms = pd.Series([arm for arm, _ in phases])
    sizes = pd.DataFrame([phase["kinds"] for _, phase in phases]).div(GIB).fillna(0)
    sizes = sizes.T.groupby(lambda kind: kind if kind in KINDS else "other").sum().T
    kinds = [kind for kind in KINDS if sizes.get(kind, pd.Series()).any()]
    looks = {kind: {"facecolor": KINDS[kind][0], "hatch": KINDS[kind][1], "edgecolor": "white"} for kind in kinds}
    shown = " and ".join(f"{width}x{height}" for width, height in setup.get("images", ()))  # older plans have none
    title = (
        f"{result['model']}: prompt {setup['prompt_tokens']:,}{f' with {shown}' if shown else ''}, "
        f"completion {setup['max_completion_length']:,}, k = {setup['num_generations']}"
    )
    handles = [Patch(**look, label=kind) for kind, look in looks.items()]
    figure = style.new_figure(9, 4.3, title, ["Predicted, not measured. " + result["versions"]], handles, columns=7)
    axes = figure.add_subplot()
    x = arms.index + 0.6 * (arms != arms.shift()).cumsum()  # a gap between arms
    tops = sizes[kinds].cumsum(axis=1)
    for kind, look in looks.items():
        held = sizes[kind] != 0
        axes.bar(x[held], sizes[kind][held], 0.8, (tops - sizes)[kind][held], linewidth=0.4, **look)
    for place, top in zip(x, tops[kinds[-1]], strict=True):
        axes.text(place, top, f"{top:.1f}", ha="center", va="bottom", fontsize=8)
    for arm, places in x.groupby(arms):
        look = {"ha": "center", "fontsize": 10, "fontweight": "bold"}
        axes.text(places.mean(), -0.2, arm, transform=axes.get_xaxis_transform(), **look)
    axes.set_xticks(x, [phase["phase"] for _, phase in phases], rotation=30, ha="right", fontsize=8)
    axes.grid(axis="x", visible=False)
    if result["device_memory_bytes"]:
        limit = result["device_memory_bytes"] / GIB
        axes.axhline(limit, color="black", linestyle=(0, (5, 3)), linewidth=1.2)
        words = f"device memory less the reserve: {limit:.1f} GiB"
        look = {"fontsize": 8, "ha": "right", "bbox": {**style.BEHIND_TEXT, "pad": 0.5}}
        style.write_at(axes, words, (0.995, limit), 0, 3, xycoords=("axes fraction", "data"), **look)
    axes.set_ylabel("predicted peak allocated (GiB)")
    axes.margins(y=0.12)
    return figure


if __name__ == "__main__":
    style.draw_one(__doc__, chart)
