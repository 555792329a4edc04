"""Tables of ways to compute one group: results/<machine>/rivals/*.csv, families/*.csv, worth.csv and decoding.csv."""

import math
from pathlib import Path

import pandas as pd

from visualization.files import LoadError, read_rows
from visualization.pages.lines import commits_in_short, markdown
from visualization.runs import MIB
from visualization.seconds import MARK, Seconds

NUMBERS = ("prompt_tokens", "completion_tokens", "k", "score_seconds", "train_seconds", "train_peak_bytes")
NAMES = {
    "whole": "whole rows (stock)",
    "one-row": "all in one row (`trl/first`)",
    "shared": "prefix sharing, all together",
    "shared-2": "prefix sharing, two a pass",
    "shared-micro-2": "prefix sharing, two a micro-batch",
}


def csv_files(folder: Path, program: str) -> list[Path]:
    """The tables that `python -m PROGRAM` wrote. Raises LoadError where there are none."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise LoadError(f"{folder}: no results; run python -m {program}")
    return paths


def measured_on(rows: pd.DataFrame) -> str:
    """What rows of one machine were measured on, in words, with every commit."""
    row = rows.iloc[0]
    versions = f"torch {row.torch_version} · transformers {row.transformers_version}"
    return f"CPU: {row.device_name} · {versions} · commit {commits_in_short(rows.commit)}"


def rivals_table(folder: Path) -> str:
    """For each workload: median seconds and how many times faster than whole rows, peak, and difference of gradients.

    Raises LoadError where there is nothing to show.
    """
    program = "experiments.evidence.rivals"
    parts = []
    for path in csv_files(folder / "rivals", program):
        rows = read_rows(path, (*NUMBERS, "gradient_difference"), program)
        first = rows.iloc[0]
        prompt, completion, k = first.prompt_tokens, first.completion_tokens, first.k
        whole = rows[rows.way == "whole"]
        ratio = k * (prompt + completion) / (prompt + k * completion)
        lines = [
            f"*{measured_on(rows)} · {first['shape']}*",
            "",
            f"Prompt {prompt:,}, completions {completion:,}, k = {k}: token ratio {ratio:.2f}. Median of "
            f"{len(whole)} alternating repeats:",
            "",
        ]
        table = []
        for way in rows.way.unique():
            mine = rows[rows.way == way]
            name = NAMES.get(way, way)
            if way == "prefix-grouper":
                name = f"`prefix-grouper` {first.prefix_grouper_version}"
            cells = [name]
            for column in ("score_seconds", "train_seconds"):
                cells.append(beside(mine[column], None if way == "whole" else whole[column], 2))
            differs = "" if way == "whole" else f"{mine.gradient_difference.max():.0e}"
            cells += [f"{mine.train_peak_bytes.median() / MIB:.0f}", differs]
            table.append(cells)
        header = ["", "score, s", "train, s", "train peak above start, MiB", "gradient differs by"]
        parts.append("\n".join([*lines, *markdown(header, table)]))
    return "\n\n".join(parts) + "\n"


PHASES = ("generate", "score", "train")
FAMILIES = {
    "gated-deltanet": "Gated DeltaNet (Qwen3.5)",
    "mamba-2": "Mamba-2 (Bamba)",
    "images": "One image of 1,024 tokens (Qwen2.5-VL)",
}


def families_table(folder: Path) -> str:
    """For each family: median seconds and peak of each phase, images encoded, and difference of gradients.

    Raises LoadError where there is nothing to show.
    """
    program = "experiments.evidence.families_cost"
    numbers = [f"{phase}_{what}" for phase in PHASES for what in ("seconds", "peak_bytes")]
    table = []
    for path in csv_files(folder / "families", program):
        rows = read_rows(
            path,
            (*numbers, "images_encoded", "gradient_difference", "prompt_tokens", "completion_tokens", "k"),
            program,
        )
        first = rows.iloc[0]
        whole = rows[rows.way == "whole"]
        size = f"prompt {first.prompt_tokens:,}, completions {first.completion_tokens:,}, k = {first.k}"
        for way in rows.way.unique():
            mine = rows[rows.way == way]
            cells = [
                f"{FAMILIES.get(first.family, first.family)}, {size}" if way == "whole" else "",
                NAMES.get(way, way),
            ]
            for phase in PHASES:
                column, peak = f"{phase}_seconds", mine[f"{phase}_peak_bytes"].median()
                took = beside(mine[column], None if way == "whole" else whole[column], 1, " s")
                cells.append(f"{took}, {peak / MIB:,.0f} MiB")
            cells.append(f"{mine.images_encoded.median():.0f}" if rows.images_encoded.any() else "")
            cells.append("" if way == "whole" else f"{mine.gradient_difference.max():.0e}")
            table.append(cells)
    header = ["", "", *PHASES, "images encoded", "gradient differs by"]
    about = (
        f"*{measured_on(rows)} · float32, 8 layers of width 256 · median of {len(whole)} alternating repeats · "
        "peak resident above the start of the phase*"
    )
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


IN_SHORT = {"shared": "together", "shared-2": "two a pass", "shared-micro-2": "two a micro-batch"}


def read_worth(folder: Path) -> pd.DataFrame:
    """The rows that python -m experiments.evidence.worth wrote, with the sum of the phases. Raises LoadError."""
    seconds = [f"{phase}_seconds" for phase in PHASES]
    cell = ("prompt_tokens", "completion_tokens", "k", "train_limit")
    rows = read_rows(folder / "worth.csv", (*cell, *seconds), "experiments.evidence.worth")
    rows["step_seconds"] = rows[seconds].sum(axis=1)
    return rows


def faster(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """How many times faster each way is than whole rows: medians, by model, prompt and completion tokens. NaN where
    repeats are too far apart."""
    by = ["model", "prompt_tokens", "completion_tokens", "way"]
    medians = rows.groupby(by)[f"{phase}_seconds"].agg(answer).unstack("way")
    return medians["whole"].to_numpy()[:, None] / medians[list(IN_SHORT)]


def answer(values: pd.Series) -> float:
    """The median in seconds, NaN where repeats are too far apart."""
    return math.nan if (found := Seconds.of(values).answer) is None else found


def times(ratio: float) -> str:
    """A ratio of `answer`s in words."""
    return MARK if math.isnan(ratio) else f"{ratio:.2f} x"


def beside(ours: pd.Series, theirs: pd.Series | None, digits: int, unit: str = "") -> str:
    """The median in seconds, and how many times faster it is than `theirs`."""
    took = Seconds.of(ours)
    ratio = took.times_faster(None if theirs is None else Seconds.of(theirs))
    return f"{took.shown(digits)}{unit}" + (f" ({ratio:.{digits}f} x)" if ratio else "")


def how_often(rows: pd.DataFrame) -> str:
    """How often each cell was measured, in words."""
    cell = [name for name in ("model", "prompt_tokens", "completion_tokens", "k", "way") if name in rows]
    counts = rows.groupby(cell)["repeat"].nunique()
    least, most = counts.min(), counts.max()
    if most == 1:
        return "measured once"
    number = f"{least} to {most}" if least < most else most
    return f"median of {number} alternating repeats"


def worth_table(folder: Path) -> str:
    """For each model and length: the limit of training, and how many times faster training and whole step are.

    Raises LoadError where there is nothing to show.
    """
    rows = read_worth(folder)
    first = rows.iloc[0]
    train, step = faster(rows, "train"), faster(rows, "step")
    limits = rows.groupby(["model", "prompt_tokens", "completion_tokens"]).train_limit.first()
    table = [
        [model, f"{prompt:,}", f"{completion:,}", f"{limits[model, prompt, completion]:.2f} x"]
        + [times(ratios.loc[model, prompt, completion][way]) for ratios in (train, step) for way in IN_SHORT]
        for model, prompt, completion in train.index
    ]
    header = ["model", "prompt", "completion", "limit of training"]
    header += [f"{what}, {way}" for what in ("training", "step") for way in IN_SHORT.values()]
    about = f"*{measured_on(rows)} · float32 · k = {first.k} · {how_often(rows)}*"
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


def decoding_table(folder: Path) -> str:
    """For each model, length and k: seconds of generation with a cache a row and with one that shares the prompt.

    Raises LoadError where there is nothing to show.
    """
    numbers = ("prompt_tokens", "completion_tokens", "k", "generate_seconds", "generate_cpu_seconds")
    rows = read_rows(folder / "decoding.csv", numbers, "experiments.evidence.decoding")
    by = ["model", "prompt_tokens", "completion_tokens", "k"]
    took = rows.groupby([*by, "way"]).generate_seconds.agg(Seconds.of).unstack("way")
    table = [
        [model, f"{prompt:,}", f"{completion:,}", f"{k}", row.whole.shown(2), row.shared.shown(2)]
        + [times(row.shared.times_faster(row.whole) or math.nan)]
        for (model, prompt, completion, k), row in took.iterrows()
    ]
    header = ["model", "prompt", "completion", "k", "a cache a row, s", "prompt shared, s", "times faster"]
    about = f"*{measured_on(rows)} · float32 · {how_often(rows)}*"
    return "\n".join([about, "", *markdown(header, table)]) + "\n"
