"""The numbers that a setting may be."""

from collections.abc import Callable
from dataclasses import dataclass

MOST_K = 4096  # completions of a prompt


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be, as a test and in words."""

    inside: Callable[[float], bool]
    words: str
    whole: bool = True

    def wrong(self, called: str, value) -> str | None:
        """What is wrong with the value of a setting that the user calls so. None, which leaves it out, is fine."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return f"{called} is {value!r}: it must be a {'whole ' if self.whole else ''}number"
        if value > 2**40:
            return f"{called} is {str(value)[:20]}: no training has as much"
        return None if self.inside(value) else f"{called} is {value}: it must be {self.words}"


AT_LEAST_1 = Range(lambda x: x >= 1, "at least 1")
GROUP = Range(lambda x: 2 <= x <= MOST_K, f"at least 2, as the others are the baseline, and at most {MOST_K}")
RANK = Range(lambda x: x >= 0, "0, which trains every weight, or more")
NOT_NEGATIVE = Range(lambda x: x >= 0, "0 or more", whole=False)
ABOVE_0 = Range(lambda x: x > 0, "above 0", whole=False)
SHARE = Range(lambda x: 0 < x <= 1, "above 0, at most 1", whole=False)
DROPOUT = Range(lambda x: 0 <= x < 1, "from 0 to below 1", whole=False)
