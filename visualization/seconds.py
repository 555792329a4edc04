"""Seconds of repeats, and when they are no answer: those of a machine that did other things, too."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from experiments.run_record import APART

MARK = "\N{DOUBLE DAGGER}"
NOTE = f"{MARK} repeats differ by more than a factor of {APART}, as on a busy machine: no part of any comparison"


@dataclass(frozen=True)
class Seconds:
    """What each repeat of one cell took, in seconds; empty where none was clocked."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Seconds":
        """Of those that exist: None and NaN are left out."""
        return cls(tuple(float(value) for value in values if value is not None and value == value))

    @property
    def median(self) -> float | None:
        """What tables and charts show."""
        return median(self.values) if self.values else None

    @property
    def mark(self) -> str:
        """The double dagger where repeats are too far apart to say anything, else nothing."""
        return MARK if self.values and max(self.values) > APART * min(self.values) else ""

    @property
    def answer(self) -> float | None:
        """The median where it may be compared with others, else None."""
        return None if self.mark else self.median

    def shown(self, digits: int) -> str:
        """The median with that many digits, and its mark."""
        return "" if self.median is None else f"{self.median:.{digits}f}{self.mark}"

    def times_faster(self, theirs: "Seconds | None") -> float | None:
        """How many times faster these are than `theirs`; None where one of the two is no answer."""
        return theirs.answer / self.answer if theirs and theirs.answer and self.answer else None


def note(texts: Iterable[str]) -> list[str]:
    """The line that explains the mark, where one of the texts has it."""
    return [NOTE] if any(MARK in text for text in texts) else []
