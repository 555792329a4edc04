"""The cells published in 2025 beside ours, like with like."""

from collections.abc import Sequence

from visualization.legacy import PUBLISHED, PUBLISHED_BUDGET, PUBLISHED_PROMPT
from visualization.pages.lines import failure, markdown
from visualization.runs import GIB, RESIDENT, Run, cells


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
        above, peak, start = cell.median("above_start_bytes"), published.peak_gib, published.start_gib
        if above is None:
            ours = failure(cell) or "no start level"
        else:
            ours = f"{above * factor / GIB:.2f}{cell.mark}" + failure(cell, " ({})")
        theirs = (
            [f"{peak:.2f}", f"{start:.2f}", f"{peak - start:.2f}"] if peak else ["out of memory", f"{start:.2f}", ""]
        )
        rows.append([f"`{arm}`", str(k), ours, *theirs])
    if not rows:
        return []
    header = [
        "arm",
        "k",
        f"ours above start x {' or '.join(sorted(factors))}, GiB",
        "published peak, GiB",
        "published start level, GiB",
        "published above start, GiB",
    ]
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
