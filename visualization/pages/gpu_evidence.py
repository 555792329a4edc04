"""Tables of what `run_gpu.sh` measures beside the published workload: kernels, exactness, real shapes, the sampler."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from visualization.files import LoadError, read_csv, read_rows
from visualization.pages.lines import commits_in_short, failure, markdown, signed
from visualization.pages.phase_seconds import PHASES
from visualization.runs import DEVICE_WORDS, GIB, MIB, Cell, Run, cells, describe, footnotes
from visualization.seconds import Seconds, note

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
        f"{first['shape']}, random weights, a prompt of P tokens, k completions of up to C. Relative errors against "
        "the same weights in float64:"
    )
    header = ["weights", "P", "C", "k", "", "log-probabilities", "gradient", "attention"]
    cells = [
        [
            *(row.precision, f"{row.prompt_tokens:,.0f}", f"{row.completion_tokens:,.0f}", f"{row.k:.0f}", row.way),
            *(f"{row.log_prob_error:.1e}", f"{row.gradient_error:.1e}", f"`{row.attention}`"),
        ]
        for row in rows.itertuples()
    ]
    return _page(first, intro, header, cells)


def kernels_table(folder: Path) -> str:
    """Errors of the attention kernels by themselves, the largest of each setting and dtype, from kernels.csv. Raises
    LoadError."""
    program = "run python -m experiments.evidence.gpu.kernels"
    rows = read_csv(folder / "kernels.csv", ("error", "masked_error", "heads", "key_heads"), program)
    if rows.empty:
        raise LoadError(f"{folder / 'kernels.csv'}: holds no rows; {program} again")
    intro = (
        "Attention to a shared prompt by itself, the largest relative error against float64 of output and gradients:"
    )
    header = ["", "heads", "dtype", "prefix sharing", "sdpa with a mask", "verdict"]
    cells = []
    for (setting, dtype), mine in rows.groupby(["setting", "dtype"], sort=False):
        wrong = [f"{row.tensor}: {row.verdict}" for row in mine.itertuples() if row.verdict != "ok"]
        errors = ["" if pd.isna(size) else f"{size:.1e}" for size in (mine.error.max(), mine.masked_error.max())]
        failed = [said for said in mine.masked_verdict if not pd.isna(said) and said != "ok"]
        errors[1] = "; ".join(filter(None, [errors[1], *dict.fromkeys(failed)]))
        heads = f"{mine.heads.iloc[0]:.0f} / {mine.key_heads.iloc[0]:.0f}"
        cells.append([setting, heads, dtype, *errors, "; ".join(wrong) or "ok"])
    return _page(rows.iloc[0], intro, header, cells)


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
            times = cell.seconds().times_faster(stock.seconds()) if stock and cell is not stock else None
            row.append((cell.seconds().shown(2) or "not recorded") + (f" ({times:.1f} x)" if times else ""))
            rows.append([*row, *(cell.seconds(phase).shown(2) or "not marked" for phase in PHASES)])
    intro = "Medians; in brackets how many times less than `stock`:"
    notes = [f"\n{line}." for line in (*footnotes(mine), *note("".join(row) for row in rows))]
    return "\n".join([f"*{describe(mine)}*", "", intro, "", *markdown(header, rows), *notes]) + "\n"


STEP = (*PHASES, "optimizer")
OF_SHAPE = ["model", "lora_rank", "prompt_tokens", "completion_tokens", "k", "completions"]
LENGTHS = {"sampled": "sampled", "given": "given", "ragged": "given, of different lengths"}


def cells_table(folder: Path) -> str:
    """Ways to train, shape by shape, from cells/*.csv, also of measurements that go on. Raises LoadError."""
    sizes = ("allocated", "reserved", "device", "resident", "predicted")
    numbers = [f"{phase}_{size}_bytes" for size in sizes for phase in STEP] + [f"{phase}_seconds" for phase in STEP]
    program = "run python -m experiments.evidence.on_gpu"
    paths = sorted((folder / "cells").glob("*.csv*"))
    if not paths:
        raise LoadError(f"{folder / 'cells'}: no cells; {program}")
    whole = ["lora_rank", "prompt_tokens", "completion_tokens", "k"]
    rows = pd.concat([read_csv(path, [*numbers, *whole], program) for path in paths], ignore_index=True)
    if rows.empty:
        raise LoadError(f"{folder / 'cells'}: holds no rows; {program} again")
    on_gpu = rows.device_kind.iloc[0] == "cuda"
    shown = ("allocated", "reserved", "device") if on_gpu else ("resident",)
    header = ["", *(f"{phase}, s" for phase in STEP), "step, s", *(f"{size}, GiB" for size in shown), "predicted, GiB"]
    parts = []
    for shape, mine in rows.groupby(OF_SHAPE, sort=False):
        model, lora, prompt, completion, k, completions = shape
        title = f"{model}{f' LoRA {lora:.0f}' if lora else ''}, P = {prompt:,.0f}, C = {completion:,.0f}, k = {k:.0f}"
        ways = {way: _way(steps, shown) for way, steps in mine.groupby("way", sort=False)}
        best = {
            name: min((x[name] for way, x in ways.items() if way.startswith("stock") and x.get(name)), default=None)
            for name in (shown[0], "answer")
        }
        table = []
        for way, found in ways.items():
            if found["status"] != "ok":
                table.append([f"`{way}`", found["status"], *[""] * (len(header) - 2)])
                continue
            row = [f"`{way}`", *(found[phase].shown(3) for phase in STEP)]
            if completions != "sampled":
                row[1] = "given"
            for name, text in (("answer", found["step"]), *((size, f"{found[size]:.2f}") for size in shown)):
                compared = best.get(name) and found[name] and not way.startswith("stock")
                row.append(text + (f" ({best[name] / found[name]:.1f} x)" if compared else ""))
            error = f" ({signed(found['predicted'] / found[shown[0]] - 1)})" if on_gpu and found["predicted"] else ""
            table.append([*row, f"{found['predicted']:.2f}{error}" if found["predicted"] else ""])
        parts.append("\n".join([f"{title}, completions {LENGTHS[completions]}:", "", *markdown(header, table)]))
    first = rows.iloc[0]
    intro = (
        "The fork's trainer on random weights; `stock` has all of the fork switched off. Medians of the steps; in "
        "brackets how many times less than the least of the ways of `stock`, and the error of the prediction:"
    )
    return "\n\n".join([_caption(first, commits_in_short(rows.commit)), intro, *parts]) + "\n"


def _way(steps: pd.DataFrame, shown: Sequence[str]) -> dict:
    """Seconds of the phases and of the step, and the highest peak of its phases in GiB. What failed says how."""
    fine = steps[steps.status == "ok"]
    if fine.empty:
        kind = steps.status.iloc[-1]
        return {"status": "out of memory" if kind == "oom" else "failed: " + steps.error.iloc[-1][:80]}
    found = {phase: Seconds.of(fine[f"{phase}_seconds"]) for phase in STEP}
    whole = Seconds.of(fine[[f"{phase}_seconds" for phase in STEP]].sum(axis=1))
    median = sum(found[phase].median or 0 for phase in STEP)
    found |= {"step": f"{median:.3f}{whole.mark}", "answer": None if whole.mark else median}
    for size in (*shown, "predicted"):
        peak = fine[[f"{phase}_{size}_bytes" for phase in STEP]].max(axis=1).median()
        found[size] = None if pd.isna(peak) else peak / GIB
    return {"status": "ok", **found}


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


def _caption(row, commits: str) -> str:
    return f"*{DEVICE_WORDS[row.device_kind]}: {row.device_name} · torch {row.torch_version} · commit {commits}*"


def _page(row, intro: str, header: list[str], cells: list[list[str]]) -> str:
    caption = _caption(row, row.commit[:10])
    return "\n".join([caption, "", intro, "", *markdown(header, cells)]) + "\n"
