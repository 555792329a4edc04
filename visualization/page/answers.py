"""How much memory, how much time, and is it exact: sentences and a small table each, from the records alone.

A rival is an arm that this project did not make and that was fed the prompts it was asked for. An arm of ours stands
beside the strongest rival of its trainer at the same k, where most rivals were run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean

from visualization import seconds
from visualization.page.html import Bold, Failed, quiet, table
from visualization.pages.lines import entry, whole
from visualization.runs import (
    ARMS,
    GIB,
    Cell,
    Run,
    by_trainer,
    cells,
    describe,
    footnotes,
    in_words,
    scales,
    shown,
    to_time,
    usual_arm,
)

OURS = ("classic-lean", "shared", "shared-accumulate")
WHOLE = 0.99  # of the prompt tokens asked for: below it, an arm was fed other prompts
CHECKED = ("reward", "loss", "kl")


@dataclass(frozen=True)
class Quantity:
    """What a table compares: a cell's figure that may be compared or None, and its text."""

    unit: str
    value: Callable[[Cell], float | None]
    text: Callable[[Cell], str]
    sentence: str


def range_of_seconds(cell: Cell) -> str:
    took = cell.seconds()
    several = f" ({min(took.values):.2f} to {max(took.values):.2f})" if len(took.values) > 1 else ""
    return took.shown(2) + several if took.values else "not recorded"


PEAK = Quantity(
    "peak above start, GiB",
    lambda cell: None if cell.above is None else cell.above / GIB,
    lambda cell: f"{cell.above / GIB:.2f}{cell.mark}",
    "At k = {k}, {ours} peaks {mine:.2f} GiB above the start level; the strongest rival, {rival}, {theirs:.2f} GiB.",
)
STEP = Quantity(
    "seconds a step",
    lambda cell: cell.seconds().answer,
    range_of_seconds,
    "At k = {k}, a step takes {mine:.2f} s with {ours}; with the strongest rival, {rival}, {theirs:.2f} s.",
)


def memory(runs: Sequence[Run]) -> str:
    """Peaks above the start level by arm and k, who ran out of memory, and what was measured."""
    out = [f"{cell.arm} at k = {cell.k}" for cell in cells(runs) if cell.count("oom")]
    failed = f'<p class="failed">Out of memory: {escape(", ".join(out))}.</p>' if out else ""
    about = [describe(runs), in_words(run.arm for run in runs), *footnotes(runs)]
    return by_arm_and_k(runs, PEAK) + failed + quiet(about)


def time(runs: Sequence[Run]) -> str:
    """Seconds a step by arm and k: medians, and the range of the repeats."""
    runs = to_time(runs)
    apart = [f"{cell.arm} at k = {cell.k}" for cell in cells(runs) if cell.seconds().mark]
    nothing = f"The seconds of {', '.join(apart)} tell nothing: repeats are too far apart ({seconds.MARK})."
    return by_arm_and_k(runs, STEP) + quiet([nothing, seconds.NOTE] if apart else [])


def by_arm_and_k(runs: Sequence[Run], what: Quantity) -> str:
    """A sentence a trainer, and the table of all of its arms: medians, in bold the strongest rival of each k."""
    found = {(cell.arm, cell.k): cell for cell in cells(runs)}
    ks = sorted({k for _, k in found})
    sentences, rows = [], []
    for arms in by_trainer(arm for arm, _ in found):
        mine = [cell for cell in found.values() if cell.arm in arms]
        rivals = {k: rivals_of([cell for cell in mine if cell.k == k], what) for k in ks}
        sentences += best_of_ours(mine, rivals, what)
        rows += [[arm, *(in_bold(found.get((arm, k)), rivals[k], what) for k in ks)] for arm in arms]
    words = " ".join(sentences) or "No arm of this project finished beside a rival here."
    head = [what.unit, *(f"k = {k}" for k in ks)]
    bold = ["Bold: the strongest rival of those that finished at that k."] if sentences else []
    return f"<p>{escape(words)}</p>" + table(head, rows, texts=(0,)) + quiet(bold)


def rivals_of(mine: Sequence[Cell], what: Quantity) -> list[Cell]:
    """Those that finished, the strongest first."""
    found = [cell for cell in mine if not is_ours(cell) and fed_whole(cell) and what.value(cell)]
    return sorted(found, key=what.value)


def best_of_ours(mine: Sequence[Cell], rivals: Mapping[int, Sequence[Cell]], what: Quantity) -> list[str]:
    """The best arm of ours where most rivals finished, at the largest such k; nothing where none did. Elsewhere the
    strongest one may not have been run."""
    known = [cell for cell in mine if is_ours(cell) and rivals[cell.k] and what.value(cell)]
    if not known:
        return []
    ours = min(known, key=lambda cell: (-len(rivals[cell.k]), -cell.k, what.value(cell)))
    rival = rivals[ours.k][0]
    figures = {"k": ours.k, "mine": what.value(ours), "theirs": what.value(rival)}
    return [what.sentence.format(ours=called(ours), rival=called(rival), **figures)]


def is_ours(cell: Cell) -> bool:
    return usual_arm(cell.arm)[0] in OURS


def fed_whole(cell: Cell) -> bool:
    asked, fed = cell.first("prompt_tokens_requested"), cell.first("prompt_tokens_fed_mean")
    return not asked or fed is None or fed >= WHOLE * asked


def in_bold(cell: Cell | None, rivals: Sequence[Cell], what: Quantity) -> str:
    text = entry(cell, what.text)
    if cell and not cell.finished:
        return Failed(text)
    return Bold(text) if cell and cell in rivals[:1] else text


def called(cell: Cell) -> str:
    """The arm with its words."""
    name, passes = usual_arm(cell.arm)
    words = ARMS.get(name, "an arm of yours")
    return f"{cell.arm} ({words.partition(', two')[0] + f', {passes} completions at a time' if passes else words})"


@dataclass(frozen=True)
class Beside:
    """An arm beside its trainer's first arm in one scale: the updates of the same k, repeat and step."""

    arm: str
    first: str
    scale: str
    asked: float | None  # prompt tokens, and the mean of those fed
    fed: float | None
    same: bool  # fed as many as the first arm
    updates: int
    differences: Mapping[str, float]  # the largest of each quantity that both logged


def exact(runs: Sequence[Run]) -> str:
    """Prompt tokens asked for and fed, and how far the updates of arms are from one another."""
    order = [*shown(runs), *(scale for scale in scales(runs) if scale not in shown(runs))]
    found = [each for scale in order for each in side_by_side([cell for cell in cells(runs) if cell.scale == scale])]
    sentences = [line for arms in by_trainer(each.arm for each in found) for line in agreement(found, arms)]
    if other := [f"{each.arm} ({each.fed:,.0f} of {each.asked:,.0f})" for each in found if not each.same]:
        sentences.append(f"Fed other prompts than asked for, and left out of this: {', '.join(dict.fromkeys(other))}.")
    if shares := [each.fed / each.asked for each in found if each.same and each.asked]:
        least = int(min(shares) * 1000) / 10
        sentences.append(f"{'The others' if other else 'All'} were fed {least:g} % or more of what was asked for.")
    rows = [
        [each.arm, each.scale, whole(each.asked), whole(each.fed), each.first, f"{each.updates or ''}"]
        + [f"{each.differences[name]:.2g}" if name in each.differences else "" for name in CHECKED]
        for each in found
    ]
    head = ["arm", "scale", "tokens asked", "tokens fed", "beside", "updates", "reward differs", "loss", "KL"]
    about = ["Differences are the largest of all updates. What else is checked: docs/exactness.md."]
    return f"<p>{escape(' '.join(sentences))}</p>" + table(head, rows, texts=(0, 1, 4)) + quiet(about)


def side_by_side(mine: Sequence[Cell]) -> list[Beside]:
    """Of the cells of one scale: every arm that was fed anything."""
    found = []
    for first, *others in by_trainer(cell.arm for cell in mine if cell.first("prompt_tokens_fed_mean")):
        of = {arm: [cell for cell in mine if cell.arm == arm] for arm in (first, *others)}
        theirs = updates(of[first])
        fed = mean_fed(of[first])
        for arm, its in of.items():
            both = [(step, theirs[at]) for at, step in updates(its).items() if at in theirs and arm != first]
            apart = {
                name: max(values)
                for name in CHECKED
                if (values := [abs(a[name] - b[name]) for a, b in both if None not in (a[name], b[name])])
            }
            asked = next((cell.first("prompt_tokens_requested") for cell in its), None)
            same = abs(mean_fed(its) - fed) < 0.5
            found.append(
                Beside(arm, first if both else "", mine[0].scale, asked, mean_fed(its), same, len(both), apart)
            )
    return found


def mean_fed(its: Sequence[Cell]) -> float:
    return mean(run.prompt_tokens_fed_mean for cell in its for run in cell.runs if run.prompt_tokens_fed_mean)


def updates(its: Sequence[Cell]) -> dict[tuple[int, int, int], Mapping]:
    """What finished runs logged, by k, repeat and step."""
    return {(run.k, run.repeat, step["step"]): step for cell in its for run in cell.finished for step in run.trace}


def agreement(found: Sequence[Beside], arms: Sequence[str]) -> list[str]:
    """How far the arms that were fed the same are from the first one at most, in a sentence."""
    mine = [each for each in found if each.arm in arms and each.same and each.differences]
    if not mine:
        return []
    names = ", ".join(dict.fromkeys(each.arm for each in mine))
    reward, loss = (max(each.differences.get(name, 0) for each in mine) for name in ("reward", "loss"))
    beside = f"Over {sum(each.updates for each in mine)} updates of {names} beside {mine[0].first}"
    return [f"{beside}, rewards differ by at most {reward:.2g} and losses by at most {loss:.2g}."]
