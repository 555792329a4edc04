"""What was measured and the planner says: how far its predictions were, and how many times as fast training was where
prompts are shared.

`measured.json` beside this file is made of the committed results by `experiments.checks.measured_ranges`.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.sizes import GIB

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class MeasuredErrors:
    """Measured over predicted, the smallest and the largest of `peaks` peaks in `trainings` trainings on `devices`."""

    low: float
    high: float
    peaks: int
    trainings: int
    devices: str

    def range_of(self, size: int) -> tuple[int, int]:
        """The smallest and the largest size that a predicted one can mean, in bytes, by these errors."""
        return round(size * self.low), round(size * self.high)

    def may_exceed(self, size: int, limit: int) -> bool:
        return self.range_of(size)[1] > limit

    def in_words(self, size: int) -> str:
        low, high = (x / GIB for x in self.range_of(size))
        return (
            f"{size / GIB:.2f} GiB stands for {low:.2f} to {high:.2f}: {self.peaks} measured peaks of "
            f"{self.trainings} small trainings on a {self.devices} were {self.low:.2f} to {self.high:.2f} of the "
            "predicted ones"
        )


@dataclass(frozen=True)
class TimesFaster:
    """How many times as fast the training pass was with shared prompts at a token ratio: the slowest and the fastest
    of the models and of the ways to share."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.1f} to {self.high:.1f} times as fast at {self.ratio:.1f}"


@functools.cache
def measured_errors() -> MeasuredErrors:
    """Of all machines that were measured."""
    return MeasuredErrors(**json.loads(FILE.read_text())["errors"])


@functools.cache
def times_faster() -> tuple[TimesFaster, ...]:
    """By token ratio, the smallest first."""
    return tuple(TimesFaster(**each) for each in json.loads(FILE.read_text())["times_faster"])
