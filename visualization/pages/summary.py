"""What a first reader needs: ways to train with k = 8, in words."""

from collections.abc import Sequence

from visualization.pages.lines import failure, markdown
from visualization.runs import GIB, IN_SHORT, Run, in_short


def summary_table(runs: Sequence[Run]) -> list[str]:
    """Seconds of a step, times faster than the first way, and peak above start. Empty but for the scale bench."""
    table = in_short(runs)
    if not any(table):
        return []
    rows = []
    for name, cell in zip(IN_SHORT.values(), table, strict=True):
        seconds, above = (cell.seconds(), cell.median("above_start_bytes")) if cell else (None, None)
        if not seconds or not seconds.median or above is None:
            rows.append([name, failure(cell) or "not recorded" if cell else "not run", "", ""])
            continue
        times = seconds.times_faster(table[0].seconds()) if table[0] else None
        faster = f"{times:.1f}" if times else ""
        rows.append([name + failure(cell, " ({})"), seconds.shown(1), faster, f"{above / GIB:.2f}{cell.mark}"])
    return markdown(["", "whole step, seconds", "times faster", "peak above start, GiB"], rows)
