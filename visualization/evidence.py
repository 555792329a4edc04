"""Tables of what `run_gpu.sh` measures beside the published workload: exactness, the sampler, real shapes."""

import re
from pathlib import Path

import pandas as pd

from visualization.runs import GIB, LoadError, in_order, markdown

MIB = 2**20
SHAPE = re.compile(r"(.+)-p(\d+)-c(\d+)$")  # a scale of `experiments.config.real_shape`
PHASES = ("generate", "score", "train")


def exactness_table(folder: Path) -> str:
    """Errors of log-probabilities and gradients against float64, from exactness.csv. Raises LoadError."""
    rows = _read(folder / "exactness.csv", "experiments.exactness")
    first = rows.iloc[0]
    lines = [
        _caption(first),
        "",
        f"{first['shape']}, random weights, prompt {first.prompt_tokens:,}, completions to "
        f"{first.completion_tokens:,}, k = {first.k}. Relative errors against the same weights in float64:",
        "",
    ]
    header = ["weights", "", "log-probabilities", "gradient", "attention"]
    cells = [
        [row.precision, row.way, f"{row.log_prob_error:.1e}", f"{row.gradient_error:.1e}", f"`{row.attention}`"]
        for row in rows.itertuples()
    ]
    return "\n".join([*lines, *markdown(header, cells)]) + "\n"


def sampler_table(folder: Path) -> str:
    """What samples alone would have missed of a peak, from sampler.csv. Raises LoadError."""
    rows = _read(folder / "sampler.csv", "experiments.sampler_check")
    first = rows.iloc[0]
    lines = [
        _caption(first),
        "",
        f"`{first.arm}`, scale {first.scale}, k = {first.k}, {rows.repeat.nunique()} alternating repeats; smallest to "
        "largest:",
        "",
    ]
    header = ["asked for, ms", "achieved, ms", "longest gap, ms", "missed of the peak, MiB", "peak, MiB"]
    cells = []
    for interval, mine in rows.groupby("interval_s"):
        sizes = (mine.achieved_interval_s * 1000, mine.longest_gap_s * 1000, mine.missed_bytes / MIB)
        cells.append([f"{interval * 1000:.0f}", *map(_range, sizes), f"{mine.peak_bytes.median() / MIB:.0f}"])
    return "\n".join([*lines, *markdown(header, cells)]) + "\n"


def shapes_table(folder: Path) -> str:
    """Peaks and seconds of real shapes, one row a shape, length, k and arm, from summary.csv and the runs' phases.csv.

    Raises LoadError where there are none."""
    rows = _read(folder / "summary.csv", "experiments.suite")
    rows = rows[rows.scale.str.contains(SHAPE.pattern.replace("(", "(?:"))]
    if rows.empty:
        raise LoadError(f"{folder}/summary.csv: no runs of real shapes; run ./run_gpu.sh")
    on_gpu = (rows.device_kind == "cuda").any()
    sizes = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes",
             "device used": "peak_device_used_bytes"} if on_gpu else {"resident": "peak_resident_bytes"}  # fmt: skip
    header = ["model", "prompt", "completion", "k", "token ratio", "", *(f"{name}, GiB" for name in sizes), "step, s",
              *(f"{name}, s" for name in PHASES)]  # fmt: skip
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
            row = [model, f"{prompt:,}", f"{completion:,}", f"{k}", f"{ratio:.1f}", f"`{arm}`"]
            if done.empty:
                told = "out of memory" if (mine.status == "oom").all() else "failed"
                cells.append([*row, told, *[""] * (len(header) - len(row) - 1)])
                continue
            for column in sizes.values():
                row.append(_against(done[column].median() / GIB, stock[column].median() / GIB, arm, ".2f"))
            seconds, theirs = done.step_seconds_median.median(), stock.step_seconds_median.median()
            row.append(_against(seconds, theirs, arm, ".2f"))
            row += [_seconds(folder, done.run_id, phase) for phase in PHASES]
            cells.append(row)
    lines = [_caption(rows.iloc[0]), "", "Medians; in brackets how many times less than `stock`:", ""]
    return "\n".join([*lines, *markdown(header, cells)]) + "\n"


def _lengths(scale: str) -> tuple[str, int, int]:
    model, prompt, completion = SHAPE.match(scale).groups()
    return model, int(prompt), int(completion)


def _against(value: float, theirs: float, arm: str, form: str) -> str:
    known = arm != "stock" and pd.notna(theirs) and value > 0
    return f"{value:{form}}" + (f" ({theirs / value:.1f} x)" if known else "")


def _seconds(folder: Path, run_ids, phase: str) -> str:
    found = []
    for run_id in run_ids:
        rows = pd.read_csv(folder / run_id / "phases.csv")
        rows = rows[(rows.phase == phase) & (rows.step > 0)]
        found.append((rows.end - rows.start).sum() / max(rows.step.nunique(), 1))
    return f"{pd.Series(found).median():.2f}"


def _range(values) -> str:
    low, high = f"{values.min():.1f}", f"{values.max():.1f}"
    return low if low == high else f"{low} to {high}"


def _read(path: Path, program: str) -> pd.DataFrame:
    if not path.exists():
        raise LoadError(f"{path}: not there; run python -m {program}")
    rows = pd.read_csv(path)
    if rows.empty:
        raise LoadError(f"{path}: holds no rows; run python -m {program} again")
    return rows


def _caption(row) -> str:
    device = "GPU" if row.device_kind == "cuda" else "CPU"
    return f"*{device}: {row.device_name} · torch {row.torch_version} · commit {str(row.commit)[:10]}*"
