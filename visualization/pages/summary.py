"""What a first reader needs: ways to train with k = 8, in words."""

from collections.abc import Sequence

from visualization.pages.lines import failure, markdown
from visualization.runs import GIB, IN_SHORT, Run, in_short


def summary_table(runs: Sequence[Run]) -> list[str]:
    """Seconds of a whole step, times faster than TRL as it is, and peak above start. Empty but for the scale bench."""
    table = in_short(runs)
    if not any(table):
        return []
    stock = table[0] and table[0].median("step_seconds_median")
    rows = []
    for name, cell in zip(IN_SHORT.values(), table, strict=True):
        seconds, above = (cell and cell.median(figure) for figure in ("step_seconds_median", "above_start_bytes"))
        if not seconds or above is None:
            rows.append([name, failure(cell) or "not recorded" if cell else "not run", "", ""])
            continue
        faster = f"{stock / seconds:.1f}" if stock else ""
        rows.append([name + failure(cell, " ({})"), f"{seconds:.1f}", faster, f"{above / GIB:.2f}{cell.mark}"])
    return markdown(["", "whole step, seconds", "times faster", "peak above start, GiB"], rows)
