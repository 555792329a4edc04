"""Tables of predictions: beside measurements, the effect of each lever, and the peaks of the profiles."""

from pathlib import Path

import pandas as pd

from visualization.files import LoadError, read_json, read_rows
from visualization.pages.lines import commits_in_short, markdown
from visualization.runs import GIB, MIB

CHECK_NUMBERS = ("prompt_tokens", "completion_tokens", "k", "vocab_size", "predicted_bytes", "measured_bytes", "error")
PLANNED = ("stock", "stock-accumulate", "shared")
REMEDY = "write it with rloo-memory plan --profile NAME --json FILE"


def read_check(folder: Path) -> pd.DataFrame:
    """plan_check.csv: one row a case and phase. Raises LoadError."""
    return read_rows(folder / "plan_check.csv", CHECK_NUMBERS, "experiments.checks.planner_check")


def machine_line(rows: pd.DataFrame) -> str:
    first, names = rows.iloc[0], {column: rows[column].unique() for column in ("device_name", "shape")}
    return (
        f"*{first.device_kind.upper()}: {' and '.join(names['device_name'])} · torch {first.torch_version} · commit "
        f"{commits_in_short(rows.commit)} · {', '.join(names['shape'])}, vocabulary {first.vocab_size:,}*"
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


# (lever, case without it, case with it) of experiments.checks.planner_check
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
        before, after = peaks.loc[without], peaks.loc[with_it]
        change = after.measured_bytes / before.measured_bytes - 1
        sizes = [f"{peak.measured_bytes / MIB:.0f} ({peak.phase})" for peak in (before, after)]
        table.append([lever, f"`{without}`, `{with_it}`", *sizes, f"{change:+.0%}".replace("-", "−")])
    lines = markdown(["lever", "case", "peak, MiB", "with it", ""], table, texts=2)
    used = rows[rows.case.isin({case for _, *cases in LEVERS for case in cases})]
    return machine_line(used) + "\n\n" + "\n".join(lines) + "\n"


def profiles_table(folder: Path) -> str:
    """Predicted peaks of the profiles, from the plans (JSON) in the folder. Raises LoadError."""
    plans = {path.stem: read_json(path, REMEDY) for path in sorted(folder.glob("*.json"))}
    if not plans:
        raise LoadError(f"{folder}: no plans; {REMEDY}")
    rows = [_profile(name, plan) for name, plan in plans.items()]
    versions = {plan["versions"] for plan in plans.values()}
    header = ["profile", "model", "prompt + completion, k", *(f"`{arm}`" for arm in PLANNED), "there is"]
    caption = f"*Predicted, not measured. {'; '.join(sorted(versions))}*"
    return "\n".join([caption, "", *markdown(header, rows, texts=3)]) + "\n"


def _profile(name: str, plan: dict) -> list[str]:
    setup = plan["predictions"][0]["setup"]
    devices = f", {setup['num_devices']} devices" if setup["num_devices"] > 1 else ""
    peaks = {p["arm"]: max(phase["total"] for phase in p["phases"]) for p in plan["predictions"]}
    return [
        f"`{name}`",
        plan["model"].rsplit("/", 1)[-1] + devices,
        f"{setup['prompt_tokens']:,} + {setup['max_completion_length']:,}, {setup['num_generations']}",
        *(f"{peaks[arm] / GIB:.1f}" for arm in PLANNED),
        f"{plan['device_memory_bytes'] / GIB:.1f}",
    ]
