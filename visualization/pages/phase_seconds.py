"""What a trainer costs in memory and in time, phase by phase."""

from collections.abc import Sequence
from statistics import median

from visualization.pages.lines import markdown
from visualization.runs import GIB, Cell, Run, change, compared, seconds_a_step

REFERENCE = "stock"  # what a user of TRL has today
PHASES = ("generate", "score", "train")


def phase_seconds(cell: Cell, phase: str) -> float | None:
    """Median over the runs of the seconds a step spends in that phase, None where it is not marked."""
    found = []
    for run in cell.clocked:
        if (seconds := seconds_a_step(run, phase)) is not None:
            found.append(seconds)
    return median(found) if found else None


def phases_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm: seconds of each phase and of the step, how many times faster than `stock`, and the peak."""
    table = compared(runs)
    reference = next((cell for cell in table if cell.arm == REFERENCE), None)
    known = [cell for cell in table if cell.first("prompt_tokens_fed_mean") and cell.first("completion_tokens")]
    k = table[0].k
    prompt, completion = (
        (known[0].first("prompt_tokens_fed_mean"), known[0].first("completion_tokens")) if known else (None, None)
    )
    ratio = f"{k * (prompt + completion) / (prompt + k * completion):.2f}" if prompt and completion else "unknown"

    def show(cell: Cell, value: float | None, theirs: float | None) -> str:
        if value is None:
            return cell.failure() or "not marked"
        return f"{value:.1f}" + (f" ({theirs / value:.1f} x)" if theirs and cell is not reference else "")

    rows = []
    for cell in table:
        row = [f"`{cell.arm}`"]
        for phase in PHASES:
            row.append(show(cell, phase_seconds(cell, phase), reference and phase_seconds(reference, phase)))
        row.append(
            show(cell, cell.median("step_seconds_median"), reference and reference.median("step_seconds_median"))
        )
        above, theirs = cell.median("above_start_bytes"), reference and reference.median("above_start_bytes")
        row.append(
            cell.failure()
            if above is None
            else f"{above / GIB:.2f}{cell.mark}"
            + (f" (1/{theirs / above:.1f})" if change(above, theirs) is not None and cell is not reference else "")
        )
        rows.append(row)
    repeats = min(len(cell.timed or cell.runs) for cell in table)
    return [
        f"Seconds at k = {k}, median of {repeats} runs, and how many times faster than `{REFERENCE}`. The token "
        f"ratio is {ratio}:",
        "",
        *markdown(
            ["arm", "generate", "score (old and reference)", "train", "whole step", "peak above start, GiB"], rows
        ),
    ]
