"""What a plan predicts: each phase's peak and what it is made of.

python -m visualization.charts.plan PLAN.json OUT.png
"""

import json
from pathlib import Path

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
    predictions = result["predictions"]
    setup = predictions[0]["setup"]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    axes = figure.add_subplot()
    x, ticks, labels, present = 0, [], [], set()
    for prediction in predictions:
        first = x
        for phase in prediction["phases"]:
            bottom = 0.0
            for kind, (colour, hatch) in KINDS.items():
                sizes = phase["kinds"].items()
                size = sum(s for name, s in sizes if (name if name in KINDS else "other") == kind) / GIB
                if size:
                    axes.bar(x, size, 0.8, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                    present.add(kind)
                bottom += size
            axes.text(x, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=8)
            ticks.append(x)
            labels.append(phase["phase"])
            x += 1
        look = {"ha": "center", "fontsize": 10, "fontweight": "bold"}
        axes.text((first + x - 1) / 2, -0.2, prediction["arm"], transform=axes.get_xaxis_transform(), **look)
        x += 0.6
    axes.set_xticks(ticks, labels, rotation=30, ha="right", fontsize=8)
    axes.grid(axis="x", visible=False)
    if result["device_memory_bytes"]:
        limit = result["device_memory_bytes"] / GIB
        axes.axhline(limit, color="black", linestyle=(0, (5, 3)), linewidth=1.2)
        words = f"device memory less the reserve: {limit:.1f} GiB"
        look = {"fontsize": 8, "ha": "right", "bbox": {**style.BEHIND_TEXT, "pad": 0.5}}
        style.write_at(axes, words, (0.995, limit), 0, 3, xycoords=("axes fraction", "data"), **look)
    axes.set_ylabel("predicted peak allocated (GiB)")
    axes.margins(y=0.12)
    looks = [(kind, *look) for kind, look in KINDS.items() if kind in present]
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=kind) for kind, colour, hatch in looks]
    axes.legend(handles=handles, fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.09))
    sizes = " and ".join(f"{width}x{height}" for width, height in setup.get("images", ()))  # older plans have none
    figure.suptitle(
        f"{result['model']}: prompt {setup['prompt_tokens']:,}{f' with {sizes}' if sizes else ''}, "
        f"completion {setup['max_completion_length']:,}, k = {setup['num_generations']}",
        fontsize=12,
        fontweight="bold",
    )
    figure.text(0.012, 0.012, "Predicted, not measured. " + result["versions"], fontsize=7.5, color="#404040")
    return figure


if __name__ == "__main__":
    style.draw_one(__doc__, chart)
