"""Tables of the runs of one scale: in short, peaks, seconds, tokens fed, phase by phase, and what was published."""

from collections.abc import Sequence

from visualization.legacy import PUBLISHED, PUBLISHED_BUDGET, PUBLISHED_PROMPT
from visualization.pages.lines import by_k, entry, failure, markdown, signed, whole, with_range
from visualization.runs import BASELINE, GIB, IN_SHORT, RESIDENT, Cell, Run, cells, compared, in_short, to_time

REFERENCE = "stock"  # what a user of TRL has today
PHASES = ("generate", "score", "train")


def summary_table(runs: Sequence[Run]) -> list[str]:
    """Seconds of a step, times faster than the first way, and peak above start. Empty but for the scale bench."""
    table = in_short(runs)
    if not any(table):
        return []
    rows = []
    for name, cell in zip(IN_SHORT.values(), table, strict=True):
        seconds, above = (cell.seconds(), cell.above) if cell else (None, None)
        if not seconds or not seconds.median or above is None:
            rows.append([name, failure(cell) or "not recorded" if cell else "not run", "", ""])
            continue
        times = seconds.times_faster(table[0].seconds()) if table[0] else None
        faster = f"{times:.1f}" if times else ""
        rows.append([name + failure(cell, " ({})"), seconds.shown(1), faster, f"{above / GIB:.2f}{cell.mark}"])
    return markdown(["", "whole step, seconds", "times faster", "peak above start, GiB"], rows)


def peak_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median peak above start in GiB, its range where noisy, its change against the baseline."""

    def show(cell: Cell, table: dict) -> str:
        text = with_range(cell.values("above_start_bytes"), GIB, cell.mark)
        fraction = cell.change(table.get((BASELINE, cell.k)))
        return text + (f", {signed(fraction)}" if fraction is not None and cell.arm != BASELINE else "")

    intro = f"Peak memory above the start level, GiB (change against `{BASELINE}` at the same k):"
    return [intro, "", *by_k(runs, show)]


def speed_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm, columns k: median seconds per step."""

    def show(cell: Cell, table: dict) -> str:
        seconds = cell.seconds()
        return with_range(seconds.values, 1, seconds.mark) if seconds.values else "not recorded"

    return ["Seconds per step, median:", "", *by_k(to_time(runs), show)]


def audit_table(runs: Sequence[Run]) -> list[str]:
    """One row per arm and k: prompt tokens asked for and really fed, peak above start, and GiB per 1,000 tokens."""
    rows = []
    for cell in cells(runs):
        above, tokens = cell.above, cell.median("tokens_in_batch")
        asked, fed = whole(cell.first("prompt_tokens_requested")), whole(cell.first("prompt_tokens_fed_mean"))
        peak = entry(cell, lambda cell: f"{cell.above / GIB:.2f}{cell.mark}")
        rate = f"{above / GIB / tokens * 1000:.3f}" if above is not None and tokens else ""
        rows.append([f"`{cell.arm}`", str(cell.k), asked, fed, peak, rate])
    header = ["arm", "k", "prompt tokens requested", "prompt tokens fed (mean)"]
    header += ["peak above start, GiB", "GiB per 1,000 tokens in the batch"]
    return ["Tokens asked for, tokens really fed, and the memory they took:", "", *markdown(header, rows)]


def phases_table(runs: Sequence[Run]) -> list[str]:
    """Rows arm: seconds of each phase and of the step, how many times faster than `stock`, and the peak."""
    table = compared(runs)
    reference = next((cell for cell in table if cell.arm == REFERENCE), None)
    lengths = ((cell.first("prompt_tokens_fed_mean"), cell.first("completion_tokens")) for cell in table)
    prompt, completion = next(filter(all, lengths), (None, None))
    k = table[0].k
    ratio = f"{k * (prompt + completion) / (prompt + k * completion):.2f}" if prompt else "unknown"

    def show(cell: Cell, phase: str | None) -> str:
        seconds = cell.seconds(phase)
        if seconds.median is None:
            return cell.failure() or "not marked"
        times = seconds.times_faster(reference.seconds(phase)) if reference and cell is not reference else None
        return seconds.shown(1) + (f" ({times:.1f} x)" if times else "")

    rows = []
    for cell in table:
        row = [f"`{cell.arm}`", *(show(cell, phase) for phase in (*PHASES, None))]
        less = cell is not reference and cell.change(reference) is not None
        times = f" (1/{reference.above / cell.above:.1f})" if less else ""
        rows.append([*row, cell.failure() if cell.above is None else f"{cell.above / GIB:.2f}{cell.mark}{times}"])
    header = ["arm", "generate", "score (old and reference)", "train", "whole step", "peak above start, GiB"]
    return [
        f"At k = {k}; in brackets, how many times faster than `{REFERENCE}`, and which part of its peak. The token "
        f"ratio is {ratio}. Seconds:",
        "",
        *markdown(header, rows),
    ]


def published_table(runs: Sequence[Run]) -> list[str]:
    """Peak above start in GiB, ours times the factor by which the scale was made smaller, theirs from their own file.

    The factor is the published card's 32 GiB over the run's budget, as vocabulary and budget shrink together. Empty
    for a scale with other prompts than the published 3,000 tokens.
    """
    table = {(cell.arm, cell.k): cell for cell in cells(runs)}
    rows, factors = [], set()
    for (arm, k), published in PUBLISHED.items():
        cell = table.get((arm, k))
        budget = cell.first("budget_bytes") if cell else None
        if not budget or cell.first("prompt_tokens_requested") != PUBLISHED_PROMPT:
            continue
        factor = PUBLISHED_BUDGET / budget
        factors.add(f"{factor:g}")
        ours = entry(cell, lambda cell, factor=factor: f"{cell.above * factor / GIB:.2f}{cell.mark}")
        peak, start, above = published.peak_gib, published.start_gib, published.above_gib
        theirs = [f"{peak:.2f}" if peak else "out of memory", f"{start:.2f}", f"{above:.2f}" if above else ""]
        rows.append([f"`{arm}`", str(k), ours, *theirs])
    if not rows:
        return []
    header = ["arm", "k", f"ours above start x {' or '.join(sorted(factors))}, GiB"]
    header += [f"published {figure}, GiB" for figure in ("peak", "start level", "above start")]
    differ = "what differs besides is the card, the versions, and the pool's fragmentation"
    if any(run.measure is RESIDENT for run in runs):
        differ = (
            "what differs besides: theirs is device-wide, with the pool's fragmentation and all that the CUDA context "
            "grows by, ours the pages of one process; theirs ran in bf16 autocast, ours in float32; and activations "
            "are not divided by the factor, so ours, multiplied by it, has too many of them"
        )
    return [
        "Ours, scaled up, beside what was published in 2025 (RTX 5090), above the start level on both sides:",
        "",
        *markdown(header, rows),
        "",
        "Published figures were called GB and are GiB. Their start level is the last sample before the first step, in "
        f"the experiment's own file; {differ}.",
    ]
