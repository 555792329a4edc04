"""Tables of what `run_gpu.sh` measures beside the published workload: exactness, the sampler, real shapes."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from visualization.bench import PHASES, seconds_a_step
from visualization.runs import DEVICE_WORDS, GIB, LoadError, in_order, markdown, read_csv

MIB = 2**20
SHAPE = re.compile(r"(.+)-p(\d+)-c(\d+)$")  # a scale of `experiments.config.real_shape`
SIZES = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device used": "peak_device_used_bytes",
}


def exactness_table(folder: Path) -> str:
    """Errors of log-probabilities and gradients against float64, from exactness.csv. Raises LoadError."""
    numbers = ("log_prob_error", "gradient_error", "prompt_tokens", "completion_tokens", "k")
    rows = _read(folder / "exactness.csv", numbers, "experiments.evidence.exactness")
    first = rows.iloc[0]
    intro = (
        f"{first['shape']}, random weights, prompt {first.prompt_tokens:,.0f}, completions to "
        f"{first.completion_tokens:,.0f}, k = {first.k:.0f}. Relative errors against the same weights in float64:"
    )
    header = ["weights", "", "log-probabilities", "gradient", "attention"]
    cells = [
        [row.precision, row.way, f"{row.log_prob_error:.1e}", f"{row.gradient_error:.1e}", f"`{row.attention}`"]
        for row in rows.itertuples()
    ]
    return _page(first, intro, header, cells)


def sampler_table(folder: Path) -> str:
    """What samples alone would have missed of a peak, from sampler.csv. Raises LoadError."""
    numbers = ("interval_s", "repeat", "achieved_interval_s", "longest_gap_s", "missed_bytes", "peak_bytes", "k")
    rows = _read(folder / "sampler.csv", numbers, "experiments.evidence.sampler_check")
    first = rows.iloc[0]
    intro = (
        f"`{first.arm}`, scale {first.scale}, k = {first.k:.0f}, {rows.repeat.nunique()} alternating repeats; "
        "smallest to largest:"
    )
    header = ["asked for, ms", "achieved, ms", "longest gap, ms", "missed of the peak, MiB", "peak, MiB"]
    cells = []
    for interval, mine in rows.groupby("interval_s"):
        sizes = (mine.achieved_interval_s * 1000, mine.longest_gap_s * 1000, mine.missed_bytes / MIB)
        cells.append([f"{interval * 1000:.0f}", *map(_range, sizes), f"{mine.peak_bytes.median() / MIB:.0f}"])
    return _page(first, intro, header, cells)


def shapes_table(folder: Path) -> str:
    """Peaks and seconds of real shapes, one row a shape, length, k and arm, from summary.csv and the runs' phases.csv.

    Raises LoadError where there are none."""
    numbers = ("k", "step_seconds_median", "peak_resident_bytes", *SIZES.values())
    rows = _read(folder / "summary.csv", numbers, "experiments.suite")
    rows = rows[rows.scale.str.fullmatch(SHAPE.pattern)]
    if rows.empty:
        raise LoadError(f"{folder}/summary.csv: no runs of real shapes; run ./run_gpu.sh")
    on_gpu = (rows.device_kind == "cuda").any()
    sizes = SIZES if on_gpu else {"resident": "peak_resident_bytes"}
    header = [
        "model",
        "prompt",
        "completion",
        "k",
        "token ratio",
        "",
        *(f"{name}, GiB" for name in sizes),
        "step, s",
        *(f"{name}, s" for name in PHASES),
    ]
    cells = []
    groups = rows.groupby(["scale", "k"])
    for scale, k in sorted(groups.groups, key=lambda key: (*_lengths(key[0]), key[1])):
        group = groups.get_group((scale, k))
        model, prompt, completion = _lengths(scale)
        ratio = k * (prompt + completion) / (prompt + k * completion)
        stock = group[(group.arm == "stock") & (group.status == "ok")]
        for arm in in_order(group.arm):
            mine = group[group.arm == arm]
            done = mine[mine.status == "ok"]
            row = [model, f"{prompt:,}", f"{completion:,}", f"{k:.0f}", f"{ratio:.1f}", f"`{arm}`"]
            if done.empty:
                told = "out of memory" if (mine.status == "oom").all() else "failed"
                cells.append([*row, told, *[""] * (len(header) - len(row) - 1)])
                continue
            for column in sizes.values():
                row.append(_against(done[column].median() / GIB, stock[column].median() / GIB, arm))
            row.append(_against(done.step_seconds_median.median(), stock.step_seconds_median.median(), arm))
            phases = [_phases(folder / run_id) for run_id in done.run_id]
            for phase in PHASES:
                row.append(f"{median(seconds_a_step(each, phase) or 0.0 for each in phases):.2f}")
            cells.append(row)
    return _page(rows.iloc[0], "Medians; in brackets how many times less than `stock`:", header, cells)


def _lengths(scale: str) -> tuple[str, int, int]:
    model, prompt, completion = SHAPE.match(scale).groups()
    return model, int(prompt), int(completion)


def _against(value: float, theirs: float, arm: str) -> str:
    known = arm != "stock" and pd.notna(theirs) and value > 0
    return f"{value:.2f}" + (f" ({theirs / value:.1f} x)" if known else "")


def _range(values) -> str:
    low, high = f"{values.min():.1f}", f"{values.max():.1f}"
    return low if low == high else f"{low} to {high}"


def _phases(run: Path) -> pd.DataFrame:
    return read_csv(run / "phases.csv", ("step", "start", "end"), "delete the run's folder and run it again")


def _read(path: Path, numbers: Sequence[str], program: str) -> pd.DataFrame:
    rows = read_csv(path, numbers, f"run python -m {program}")
    if rows.empty:
        raise LoadError(f"{path}: holds no rows; run python -m {program} again")
    return rows


def _page(row, intro: str, header: list[str], cells: list[list[str]]) -> str:
    device = DEVICE_WORDS[row.device_kind]
    caption = f"*{device}: {row.device_name} · torch {row.torch_version} · commit {row.commit[:10]}*"
    return "\n".join([caption, "", intro, "", *markdown(header, cells)]) + "\n"
