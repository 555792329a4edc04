"""Tables of predictions: beside measurements, the effect of each lever, the profiles, and published peaks of GPUs."""

import json
from pathlib import Path

import pandas as pd

from visualization.results import GIB, MIB, joined, span
from visualization.tables.text import markdown, measured_on

PLANNED = ("stock", "stock-accumulate", "shared")
WORDS = {"out of memory": "card's memory, and it ran out"}
# (lever, case without it, case with it) of experiments.checks.planner_check
LEVERS = (
    ("prefix sharing", "stock-k8", "shared-k8"),
    ("the same, LoRA", "stock-k8-lora", "shared-k8-lora"),
    ("the same, no checkpointing", "stock-k8-plain", "shared-k8-plain"),
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


def machine_line(rows: pd.DataFrame) -> str:
    return measured_on(rows, f"{', '.join(rows['shape'].unique())}, vocabulary {rows.vocab_size.iloc[0]:,}")


def kind_of(case: str, shape: str) -> str:
    """What a case of plan_check.csv is about."""
    text = "text, LoRA" if "-lora" in case else "text"
    kind = {"qwen3-8-layers": text}.get(shape, "images" if "-vl-" in shape or "gemma" in shape else "hybrids")
    return f"{kind}: {'prompts shared' if case.startswith('shared') else 'whole rows'}"


def check(folder: Path) -> str:
    """How far predictions are from measurements, from plan_check.csv: by kind, lowest to highest."""
    rows = pd.read_csv(folder / "plan_check.csv")
    worst = rows.loc[rows.error.abs().idxmax()]
    kinds = rows.assign(kind=[kind_of(*each) for each in zip(rows["case"], rows["shape"], strict=True)])
    table = []
    for kind, mine in kinds.groupby("kind"):
        errors = mine.groupby("phase", sort=False).error.agg(["min", "max"])
        spans = [f"{low:+.1%} to {high:+.1%}" for low, high in errors.itertuples(index=False)]
        table.append([kind, str(mine.case.nunique()), span(mine.measured_bytes / MIB), *spans])
    prompts, completions = (span(rows[f"{what}_tokens"]) for what in ("prompt", "completion"))
    header = ["", "cases", "peaks, MiB", *rows.phase.unique()]
    return (
        f"{machine_line(rows)}\n\nHow far each phase's prediction is from its measured peak, with prompts of "
        f"{prompts} tokens and completions of {completions}. The largest error is {worst.error:+.1%} ({worst.case}, "
        f"{worst.phase}). Each case is in `plan_check.csv`:\n\n{markdown(header, table)}\n"
    )


def levers(folder: Path) -> str:
    """Measured peak without and with each lever, and what it is predicted to change on CUDA, from plan_check.csv."""
    rows = pd.read_csv(folder / "plan_check.csv")
    measured, on_cuda = (
        rows.loc[rows.groupby("case")[column].idxmax()].set_index("case").rename(columns={column: "peak"})
        for column in ("measured_bytes", "predicted_on_cuda_bytes")
    )
    table = []
    for lever, *cases in LEVERS:
        sizes = [f"{peak / MIB:.0f} ({phase})" for peak, phase in measured.loc[cases, ["peak", "phase"]].values]
        pairs = (of.loc[cases, "peak"] for of in (measured, on_cuda))
        changes = [f"{after / before - 1:+.0%}".replace("-", "\N{MINUS SIGN}") for before, after in pairs]
        table.append([lever, "`{}`, `{}`".format(*cases), *sizes, *changes])
    used = rows[rows.case.isin({case for _, *cases in LEVERS for case in cases})]
    header = ["lever", "case", "peak, MiB", "with it", "", "CUDA, predicted"]
    return machine_line(used) + "\n\n" + markdown(header, table, texts=2) + "\n"


def profiles(folder: Path) -> str:
    """Predicted peaks of the profiles, from the plans (JSON) in the folder."""
    plans = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    rows = []
    for name, plan in plans.items():
        setup = plan["predictions"][0]["setup"]
        devices = f", {setup['num_devices']} devices" if setup["num_devices"] > 1 else ""
        peaks = {p["arm"]: max(phase["total"] for phase in p["phases"]) / GIB for p in plan["predictions"]}
        lengths = f"{setup['prompt_tokens']:,} + {setup['max_completion_length']:,}, {setup['num_generations']}"
        sizes = [f"{size:.1f}" for size in (*(peaks[arm] for arm in PLANNED), plan["device_memory_bytes"] / GIB)]
        rows.append([f"`{name}`", plan["model"].rsplit("/", 1)[-1] + devices, lengths, *sizes])
    header = ["profile", "model", "prompt + completion, k", *(f"`{arm}`" for arm in PLANNED), "there is"]
    versions = "; ".join(sorted({plan["versions"] for plan in plans.values()}))
    return f"*Predicted, not measured. {versions}*\n\n{markdown(header, rows, texts=3)}\n"


def read_peaks(folder: Path) -> pd.DataFrame:
    """One row a published figure."""
    return pd.read_csv(
        folder / "predicted.csv", keep_default_na=False, na_values={"ratio": [""], "predicted_bytes": [""]}
    )


def allocated(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Of the allocated peaks that are held, measured over predicted: those without FSDP, those under it. A peak that
    several cards or drivers had to the digit counts once."""
    held = rows[(rows.metric == "allocated") & (rows.not_held == "")].drop_duplicates(["model", "measured_gib"])
    sharded = held["where"].str.contains("fully_sharded")
    return held.ratio[~sharded], held.ratio[sharded]


def within(rows: pd.DataFrame) -> str:
    """How far the allocated peaks that are held are from what is predicted."""
    near, under_fsdp = allocated(rows)
    words = f"{len(near)} allocated peaks are {span(near, 3)} of the prediction, median {near.median():.3f}"
    return f"{words}; under FSDP {', '.join(map('{:.3f}'.format, under_fsdp))}"


def gpu_peaks(folder: Path) -> str:
    """Held rows, those of one metric and kind of training together; then how many others there are."""
    rows = read_peaks(folder)
    held, others, table = rows[rows.not_held == ""], rows[rows.not_held != ""], []
    kinds = held.trained.str.split().str[0].str.replace("all", "all weights")
    for (metric, trained), mine in held.groupby(["metric", kinds], sort=False):
        names = mine.card, mine.model.str.rpartition("/")[2]
        cards, models = (", ".join(dict.fromkeys(each)) for each in names)
        spans = [span(mine.measured_gib, 1), span(mine.ratio, 3)]
        table.append([WORDS.get(metric, metric), trained, str(len(mine)), cards, models, *spans])
    header = ["what was measured", "trained", "figures", "cards", "models", "GiB", "of the predicted"]
    not_held = f"{len(others)} figures are not held; each row of `results/published/gpu_peaks.csv` says why."
    about = f"*{within(rows)}. Commit {joined(rows.commit.str[:10])}.*"
    return "\n".join([about, "", markdown(header, table, 5), "", not_held]) + "\n"
