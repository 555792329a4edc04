"""How much memory, how much time, and is it exact: sentences and a small table each, from the records alone.

A rival is an arm that this project did not make and that was fed the prompts it was asked for. An arm of ours stands
beside the strongest rival of its trainer at the same k.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from visualization import seconds
from visualization.page.html import Failed, quiet, table
from visualization.pages.lines import whole
from visualization.runs import (
    ARMS,
    GIB,
    Cell,
    Run,
    by_trainer,
    cells,
    describe,
    footnotes,
    in_order,
    in_words,
    scales,
    usual_arm,
)

OURS = ("classic-lean", "shared", "shared-accumulate")
WHOLE = 0.99  # of the prompt tokens asked for: below it, an arm was fed other prompts
CHECKED = ("reward", "loss", "kl")


@dataclass(frozen=True)
class Quantity:
    """What a table compares: what a cell has of it, None where it has no figure, and how that is written."""

    value: Callable[[Cell], float | None]
    shown: Callable[[Cell], str]
    sentence: str


def memory(runs: Sequence[Run]) -> str:
    """Peaks above the start level by arm and k."""
    out = [f"{cell.arm} at k = {cell.k}" for cell in cells(runs) if cell.count("oom")]
    failed = f'<p class="failed">Out of memory: {escape(", ".join(out))}.</p>' if out else ""
    return compared_by_k(runs, PEAK, "peak above start, GiB") + failed


def time(runs: Sequence[Run]) -> str:
    """Seconds a step by arm and k: medians, and the range of the repeats."""
    apart = [f"{cell.arm} at k = {cell.k}" for cell in cells(runs) if cell.seconds().mark]
    told = f"The seconds of {', '.join(apart)} tell nothing: repeats are too far apart ({seconds.MARK})."
    told = f"<p>{escape(told)}</p>" if apart else ""
    return compared_by_k(runs, STEP, "seconds a step") + told + quiet([seconds.NOTE] if apart else [])


def compared_by_k(runs: Sequence[Run], what: Quantity, unit: str) -> str:
    found = {(cell.arm, cell.k): cell for cell in cells(runs)}
    ks = sorted({k for _, k in found})
    sentences, rows = [], []
    for arms in by_trainer(arm for arm, _ in found):
        mine = [cell for cell in found.values() if cell.arm in arms]
        sentences += best_of_ours(mine, what)
        rows += [[arm, *(entry(found.get((arm, k)), mine, what) for k in ks)] for arm in arms]
    words = " ".join(sentences) or "No arm of this project finished beside a rival here."
    notes = [describe(runs), in_words(run.arm for run in runs), *footnotes(runs)]
    head = [f"arm ({unit})", *(f"k = {k}" for k in ks)]
    return f"<p>{escape(words)}</p>" + table(head, rows, texts=(0,)) + quiet(notes)


def best_of_ours(mine: Sequence[Cell], what: Quantity) -> list[str]:
    """The best arm of ours at the largest k where a rival finished, too; nothing where there is no such k."""
    pairs = [(cell, strongest_rival(cell, mine, what)) for cell in mine if is_ours(cell) and what.value(cell)]
    pairs = [(ours, rival) for ours, rival in pairs if rival]
    if not pairs:
        return []
    ours, rival = min(pairs, key=lambda pair: (-pair[0].k, what.value(pair[0])))
    return [what.sentence.format(
        k=ours.k, ours=called(ours), mine=what.shown(ours), rival=called(rival), theirs=what.shown(rival)
    )]  # fmt: skip


def is_ours(cell: Cell) -> bool:
    return usual_arm(cell.arm)[0] in OURS


def strongest_rival(ours: Cell, others: Sequence[Cell], what: Quantity) -> Cell | None:
    """Of the same k, the one with the least; None where none finished."""
    rivals = [cell for cell in others if cell.k == ours.k and not is_ours(cell) and what.value(cell)]
    return min((cell for cell in rivals if fed_whole(cell)), key=what.value, default=None)


def fed_whole(cell: Cell) -> bool:
    asked, fed = cell.first("prompt_tokens_requested"), cell.first("prompt_tokens_fed_mean")
    return not asked or fed is None or fed >= WHOLE * asked


def entry(cell: Cell | None, others: Sequence[Cell], what: Quantity) -> str:
    """The cell's figure, for one of ours with the strongest rival's beside it; a failed one is named."""
    if cell is None:
        return "not run"
    failed = cell.failure("out of memory")
    if not cell.finished:
        return Failed(failed)
    text = what.shown(cell) + (f" ({failed})" if failed else "")
    rival = strongest_rival(cell, others, what) if is_ours(cell) else None
    return text + (f" beside {what.shown(rival)} ({rival.arm})" if rival else "")


def peak(cell: Cell) -> str:
    above = cell.median("above_start_bytes")
    return "no start level" if above is None else f"{above / GIB:.2f}{cell.mark}"


def step(cell: Cell) -> str:
    took = cell.seconds()
    if not took.values:
        return "not recorded"
    several = f" ({min(took.values):.2f} to {max(took.values):.2f})" if len(took.values) > 1 else ""
    return took.shown(2) + several


PEAK = Quantity(
    lambda cell: cell.median("above_start_bytes"), peak,
    "At k = {k}, {ours} peaks at {mine} GiB above the start level; the strongest rival, {rival}, at {theirs} GiB.",
)  # fmt: skip
STEP = Quantity(
    lambda cell: cell.seconds().answer, step,
    "At k = {k}, a step takes {mine} s with {ours}; with the fastest rival, {rival}, {theirs} s.",
)  # fmt: skip


def called(cell: Cell) -> str:
    """The arm with its words."""
    name, passes = usual_arm(cell.arm)
    words = ARMS.get(name, "an arm of yours")
    return f"{cell.arm} ({words.partition(', two')[0] + f', {passes} completions at a time' if passes else words})"


@dataclass(frozen=True)
class Beside:
    """An arm's updates beside those of its trainer's first arm: same scale, k, repeat and step."""

    arm: str
    first: str
    cells: tuple[Cell, ...]
    updates: int
    differences: dict[str, float]  # the largest of each that was logged


def exact(runs: Sequence[Run]) -> str:
    """Prompt tokens asked for and fed, and how far the updates of arms are from one another."""
    found = [beside for scale in scales(runs) for beside in side_by_side([c for c in cells(runs) if c.scale == scale])]
    sentences = [sentence for arms in by_trainer(each.arm for each in found) for sentence in agreement(found, arms)]
    cut = sorted({each.arm for each in found if not all(map(fed_whole, each.cells))})
    others = f"Fed fewer prompt tokens than asked for: {', '.join(cut)}. Every other arm" if cut else "Every arm"
    sentences.append(f"{others} was fed at least {WHOLE:.0%} of the prompt tokens asked for.")
    sentences.append("What else is checked, and against what: docs/exactness.md.")
    rows = [
        [each.arm, each.cells[0].scale, *tokens(each.cells), each.first, f"{each.updates or ''}"]
        + [f"{each.differences[name]:.1e}" if name in each.differences else "" for name in CHECKED]
        for each in found
    ]
    head = ["arm", "scale", "prompt tokens asked for", "fed, mean", "beside", "updates"]
    head += [f"largest difference of {name}" for name in ("rewards", "losses", "KL")]
    return f"<p>{escape(' '.join(sentences))}</p>" + table(head, rows, texts=(0, 1, 4))


def side_by_side(mine: Sequence[Cell]) -> list[Beside]:
    """Of the cells of one scale: every arm that fed anything, each beside its trainer's first."""
    found = []
    for arms in by_trainer(cell.arm for cell in mine if cell.first("prompt_tokens_fed_mean")):
        first = updates(cell for cell in mine if cell.arm == arms[0])
        for arm in arms:
            its = tuple(cell for cell in mine if cell.arm == arm)
            ours = updates(its) if arm != arms[0] else {}
            both = [(step, first[at]) for at, step in ours.items() if at in first]
            differences = {
                name: max(apart)
                for name in CHECKED
                if (apart := [abs(a[name] - b[name]) for a, b in both if None not in (a[name], b[name])])
            }
            found.append(Beside(arm, arms[0] if both else "", its, len(both), differences))
    return found


def updates(mine: Iterable[Cell]) -> dict[tuple[int, int, int], Mapping]:
    """What finished runs logged, by k, repeat and step."""
    return {(run.k, run.repeat, step["step"]): step for cell in mine for run in cell.finished for step in run.trace}


def agreement(found: Sequence[Beside], arms: Sequence[str]) -> list[str]:
    """How far at most the arms that were fed the same are from the first one, in a sentence."""
    mine = [each for each in found if each.arm in arms and each.differences and all(map(fed_whole, each.cells))]
    if not mine:
        return []
    names = in_order(each.arm for each in mine)
    reward, loss = (max(each.differences.get(name, 0) for each in mine) for name in ("reward", "loss"))
    count = sum(each.updates for each in mine)
    return [
        f"Over {count} updates of {', '.join(names)} beside {mine[0].first}, rewards differ by at most {reward:.1e} and "
        f"losses by at most {loss:.1e}."
    ]


def tokens(mine: Sequence[Cell]) -> list[str]:
    """Prompt tokens asked for and fed, in the first run that says so."""
    asked, fed = (
        next((value for cell in mine if (value := cell.first(name)) is not None), None)
        for name in ("prompt_tokens_requested", "prompt_tokens_fed_mean")
    )
    return [whole(asked), whole(fed)]
