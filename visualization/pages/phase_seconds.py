"""What a trainer costs in memory and in time, phase by phase."""

from collections.abc import Sequence

from visualization.pages.lines import markdown
from visualization.runs import GIB, Cell, Run, change, compared

REFERENCE = "stock"  # what a user of TRL has today
PHASES = ("generate", "score", "train")


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

    def show(cell: Cell, phase: str | None) -> str:
        seconds = cell.seconds(phase)
        if seconds.median is None:
            return cell.failure() or "not marked"
        times = seconds.times_faster(reference.seconds(phase)) if reference and cell is not reference else None
        return seconds.shown(1) + (f" ({times:.1f} x)" if times else "")

    rows = []
    for cell in table:
        row = [f"`{cell.arm}`", *(show(cell, phase) for phase in (*PHASES, None))]
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
