"""Tables of a machine's runs: peaks, seconds, and tokens really fed."""

from collections.abc import Sequence

from visualization.pages.lines import by_k, failure, markdown, signed, whole, with_range
from visualization.runs import GIB, Cell, Run, cells, change

BASELINE = "classic-baseline"


def peak_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median peak above start in GiB, its range where noisy, its change against the baseline."""

    def show(cell: Cell, table: dict) -> str:
        above = cell.median("above_start_bytes")
        if above is None:
            return "no start level"
        text = with_range(cell.values("above_start_bytes"), GIB, cell.mark)
        reference = table.get((BASELINE, cell.k))
        theirs = reference and reference.median("above_start_bytes")
        fraction = change(above, theirs)
        return text + (f", {signed(fraction)}" if fraction is not None and cell.arm != BASELINE else "")

    return [
        f"Peak memory above the start level, GiB (change against `{BASELINE}` at the same k):",
        "",
        *by_k(runs, show),
    ]


def speed_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median seconds per step."""

    def show(cell: Cell, table: dict) -> str:
        seconds = cell.seconds()
        return with_range(seconds.values, 1, seconds.mark) if seconds.values else "not recorded"

    return ["Seconds per step, median:", "", *by_k(runs, show)]


def audit_table(runs: Sequence[Run]) -> list[str]:
    """One row per arm and k: prompt tokens asked for and really fed, peak above start, and GiB per 1,000 tokens."""
    rows = []
    for cell in cells(runs):
        above, tokens = cell.median("above_start_bytes"), cell.median("tokens_in_batch")
        figures = [whole(cell.first("prompt_tokens_requested")), whole(cell.first("prompt_tokens_fed_mean"))]
        if not cell.finished:
            figures += [failure(cell), ""]
        else:
            figures += [
                "" if above is None else f"{above / GIB:.2f}{cell.mark}" + failure(cell, " ({})"),
                "" if above is None or not tokens else f"{above / GIB / tokens * 1000:.3f}",
            ]
        rows.append([f"`{cell.arm}`", str(cell.k), *figures])
    header = [
        "arm",
        "k",
        "prompt tokens requested",
        "prompt tokens fed (mean)",
        "peak above start, GiB",
        "GiB per 1,000 tokens in the batch",
    ]
    return ["Tokens asked for, tokens really fed, and the memory they took:", "", *markdown(header, rows)]
