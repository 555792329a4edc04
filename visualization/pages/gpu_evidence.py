"""Tables of what `run_gpu.sh` measures beside the published workload: exactness, the sampler, real shapes."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from visualization.files import LoadError, read_rows
from visualization.pages.lines import failure, markdown
from visualization.pages.phase_seconds import PHASES, phase_seconds
from visualization.runs import DEVICE_WORDS, GIB, MIB, Cell, Run, cells, describe, footnotes

SHAPE = re.compile(r"(.+)-p(\d+)-c(\d+)$")  # a scale of `experiments.config.real_shape`
SIZES = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device used": "peak_device_used_bytes",
}


def exactness_table(folder: Path) -> str:
    """Errors of log-probabilities and gradients against float64, from exactness.csv. Raises LoadError."""
    numbers = ("log_prob_error", "gradient_error", "prompt_tokens", "completion_tokens", "k")
    rows = read_rows(folder / "exactness.csv", numbers, "experiments.evidence.exactness")
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
    rows = read_rows(folder / "sampler.csv", numbers, "experiments.evidence.sampler_check")
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


def shapes_table(runs: Sequence[Run]) -> str:
    """Peaks and seconds of real shapes, one row a shape, length, k and arm. Raises LoadError where there are none."""
    mine = [run for run in runs if SHAPE.fullmatch(run.scale)]
    if not mine:
        raise LoadError("no runs of real shapes; run ./run_gpu.sh")
    sizes = SIZES if any(run.device_kind == "cuda" for run in mine) else {"resident": "peak_resident_bytes"}
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
    table = {(cell.scale, cell.k, cell.arm): cell for cell in cells(mine)}
    rows = []
    for scale, k in sorted({key[:2] for key in table}, key=lambda key: (*_lengths(key[0]), key[1])):
        model, prompt, completion = _lengths(scale)
        ratio = k * (prompt + completion) / (prompt + k * completion)
        stock = table.get((scale, k, "stock"))
        for cell in (cell for key, cell in table.items() if key[:2] == (scale, k)):
            row = [model, f"{prompt:,}", f"{completion:,}", f"{k}", f"{ratio:.1f}", f"`{cell.arm}`"]
            if not cell.finished:
                rows.append([*row, failure(cell), *[""] * (len(header) - len(row) - 1)])
                continue
            row[-1] += failure(cell, " ({})")
            row += [_against(_peak(cell, column), stock and _peak(stock, column), cell) for column in sizes.values()]
            theirs = stock and stock.median("step_seconds_median")
            row.append(_against(cell.median("step_seconds_median"), theirs, cell))
            seconds = [phase_seconds(cell, phase) for phase in PHASES]
            rows.append([*row, *("not marked" if value is None else f"{value:.2f}" for value in seconds)])
    intro = "Medians; in brackets how many times less than `stock`:"
    notes = [f"\n{line}." for line in footnotes(mine)]
    return "\n".join([f"*{describe(mine)}*", "", intro, "", *markdown(header, rows), *notes]) + "\n"


def _peak(cell: Cell, column: str) -> float | None:
    sizes = [run.peaks[column] / GIB for run in cell.finished if run.peaks[column] is not None]
    return median(sizes) if sizes else None


def _lengths(scale: str) -> tuple[str, int, int]:
    model, prompt, completion = SHAPE.match(scale).groups()
    return model, int(prompt), int(completion)


def _against(value: float | None, theirs: float | None, cell: Cell) -> str:
    if value is None:
        return "not recorded"
    return f"{value:.2f}{cell.mark}" + (
        f" ({theirs / value:.1f} x)" if cell.arm != "stock" and theirs and value else ""
    )


def _range(values) -> str:
    low, high = f"{values.min():.1f}", f"{values.max():.1f}"
    return low if low == high else f"{low} to {high}"


def _page(row, intro: str, header: list[str], cells: list[list[str]]) -> str:
    device = DEVICE_WORDS[row.device_kind]
    caption = f"*{device}: {row.device_name} · torch {row.torch_version} · commit {row.commit[:10]}*"
    return "\n".join([caption, "", intro, "", *markdown(header, cells)]) + "\n"
