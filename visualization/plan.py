"""What a plan predicts: a chart of what each phase's peak is made of, and tables of predictions.

python -m visualization.plan plan.json plan.png
"""

import json
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from visualization import style  # noqa: F401  (sets how every chart looks)
from visualization.runs import GIB, LoadError, markdown

MIB = 2**20
# Okabe-Ito, and hatches that tell the kinds apart in grey print
KINDS = {
    "parameters": ("#0072B2", ""),
    "reference": ("#56B4E9", "//"),
    "reward model": ("#332288", "||"),
    "gradients": ("#D55E00", "\\\\"),
    "optimizer state": ("#E69F00", "xx"),
    "KV cache": ("#CC79A7", ".."),
    "activations": ("#009E73", ""),
    "logits": ("#F0E442", "--"),
    "other": ("#7F7F7F", "oo"),
}


def chart(result: dict) -> Figure:
    """Stacked bars of the result that `experiments.plan --json` writes: one group an arm, one bar a phase."""
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
        axes.text(
            (first + x - 1) / 2,
            -0.2,
            prediction["arm"],
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize=10,
            fontweight="bold",
        )
        x += 0.6
    axes.set_xticks(ticks, labels, rotation=30, ha="right", fontsize=8)
    axes.grid(axis="x", visible=False)
    if result["device_memory_bytes"]:
        limit = result["device_memory_bytes"] / GIB
        axes.axhline(limit, color="black", linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            f"device memory less the reserve: {limit:.1f} GiB",
            (0.995, limit),
            xytext=(0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
            ha="right",
            bbox=dict(facecolor="white", edgecolor="none", pad=0.5, alpha=0.8),
        )
    axes.set_ylabel("predicted peak allocated (GiB)")
    axes.margins(y=0.12)
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=kind)
        for kind, (colour, hatch) in KINDS.items()
        if kind in present
    ]
    axes.legend(handles=handles, fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.09))
    figure.suptitle(
        f"{result['model']}: prompt {setup['prompt_tokens']:,}, completion {setup['max_completion_length']:,}, "
        f"k = {setup['num_generations']}",
        fontsize=12,
        fontweight="bold",
    )
    figure.text(0.012, 0.012, "Predicted, not measured. " + result["versions"], fontsize=7.5, color="#404040")
    return figure


def read_check(folder: Path) -> pd.DataFrame:
    """plan_check.csv: one row a case and phase. Raises LoadError."""
    path = folder / "plan_check.csv"
    if not path.exists():
        raise LoadError(f"{path}: not there; run python -m experiments.evidence.planner_check")
    return pd.read_csv(path)


def machine_line(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    commits = ", ".join(dict.fromkeys(commit[:10] for commit in rows.commit))
    return (
        f"*{first.device_kind.upper()}: {first.device_name} · torch {first.torch_version} · commit {commits} · "
        f"{first['shape']}, vocabulary {first.vocab_size:,}*"
    )


def check_table(folder: Path) -> str:
    """Predictions beside measurements, from plan_check.csv in results/<machine>. Raises LoadError."""
    rows = read_check(folder)
    phases = list(rows.phase.unique())
    worst = rows.loc[rows.error.abs().idxmax()]
    lines = [
        machine_line(rows),
        "",
        f"Predicted / measured peak of each phase, MiB. The largest error is {worst.error:+.1%} ({worst.case}, "
        f"{worst.phase}):",
        "",
    ]
    table = []
    for case, mine in rows.groupby("case", sort=False):
        one = mine.iloc[0]
        cells = [f"`{case}`", f"{one.prompt_tokens:,}", f"{one.completion_tokens:,}", f"{one.k}"]
        for phase in phases:
            at = mine[mine.phase == phase].iloc[0]
            sizes = f"{at.predicted_bytes / MIB:.0f} / {at.measured_bytes / MIB:.0f}"
            cells.append(f"{sizes} ({at.error:+.1%})")
        table.append(cells)
    return "\n".join([*lines, *markdown(["case", "prompt", "completion", "k", *phases], table)]) + "\n"


# (lever, case without it, case with it) of experiments.evidence.planner_check
LEVERS = (
    ("prefix sharing", "stock-k8", "shared-k8"),
    ("the same, LoRA", "stock-k8-lora", "shared-k8-lora"),
    ("the same, no checkpointing", "stock-k8-plain", "shared-k8-plain"),
    ("two completions a pass, not eight", "shared-k8-together", "shared-k8"),
    ("accumulation, row by row", "stock-k8", "accumulate-k8"),
    ("token budget of two rows", "stock-k8", "tokens-k8"),
    ("the same, LoRA", "stock-k8-lora", "tokens-k8-lora"),
    ("gradient checkpointing", "stock-k8-plain", "stock-k8"),
    ("no reference", "stock-k8", "stock-k8-beta0"),
    ("bfloat16 weights", "stock-k8", "stock-k8-bf16"),
    ("8-bit optimizer", "stock-k8", "stock-k8-adam8"),
    ("LoRA, rank 16, in bfloat16", "stock-k8-bf16", "stock-k8-lora"),
    ("8-bit weights under LoRA", "stock-k8-lora32", "stock-k8-lora-8bit"),
    ("4-bit weights under LoRA", "stock-k8-lora32", "stock-k8-lora-4bit"),
    ("half of k", "stock-k8", "stock-k4"),
)


def levers_table(folder: Path) -> str:
    """Measured peak without and with each lever, from plan_check.csv in results/<machine>. Raises LoadError."""
    rows = read_check(folder)
    peaks = rows.loc[rows.groupby("case").measured_bytes.idxmax()].set_index("case")
    table = []
    for lever, without, with_it in LEVERS:
        if missing := {without, with_it} - set(peaks.index):
            raise LoadError(f"{folder}/plan_check.csv has no case {', '.join(sorted(missing))}")
        before, after = peaks.loc[without], peaks.loc[with_it]
        change = after.measured_bytes / before.measured_bytes - 1
        sizes = [f"{peak.measured_bytes / MIB:.0f} ({peak.phase})" for peak in (before, after)]
        table.append([lever, f"`{without}`, `{with_it}`", *sizes, f"{change:+.0%}".replace("-", "−")])
    lines = markdown(["lever", "case", "peak, MiB", "with it", ""], table, texts=2)
    return machine_line(rows) + "\n\n" + "\n".join(lines) + "\n"


def profiles_table(folder: Path) -> str:
    """Predicted peaks of the profiles, from the plans (JSON) in the folder. Raises LoadError."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise LoadError(f"{folder}: no plans; write them with python -m experiments.plan --profile NAME --json FILE")
    arms, table = ("stock", "accumulate", "shared"), []
    for path in paths:
        plan = json.loads(path.read_text())
        setup = plan["predictions"][0]["setup"]
        devices = f", {setup['num_devices']} devices" if setup["num_devices"] > 1 else ""
        peaks = {p["arm"]: max(phase["total"] for phase in p["phases"]) for p in plan["predictions"]}
        cells = [
            f"`{path.stem}`",
            plan["model"].rsplit("/", 1)[-1] + devices,
            f"{setup['prompt_tokens']:,} + {setup['max_completion_length']:,}, {setup['num_generations']}",
            *(f"{peaks[arm] / GIB:.1f}" for arm in arms),
            f"{plan['device_memory_bytes'] / GIB:.1f}",
        ]
        table.append(cells)
    header = ["profile", "model", "prompt + completion, k", *(f"`{arm}`" for arm in arms), "there is"]
    lines = markdown(header, table, texts=3)
    return f"*Predicted, not measured. {plan['versions']}*\n\n" + "\n".join(lines) + "\n"


def draw(result: dict, path: Path) -> None:
    """Write the chart. Raises OSError where the file cannot be written."""
    chart(result).savefig(path, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m visualization.plan plan.json plan.png")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
