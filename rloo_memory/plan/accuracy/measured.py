"""What was measured and the planner says: how far its predictions were.

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

    def may_exceed(self, size: int, limit: int) -> bool:
        """Whether more than the limit was measured where as much was predicted, by these errors."""
        return round(size * self.high) > limit

    def in_words(self, size: int) -> str:
        gib = size / GIB
        return (
            f"{gib:.2f} GiB stands for {gib * self.low:.2f} to {gib * self.high:.2f}: {self.peaks} measured peaks of "
            f"{self.trainings} small trainings on a {self.devices} were {self.low:.2f} to {self.high:.2f} of the "
            "predicted ones"
        )


@functools.cache
def measured_errors() -> MeasuredErrors:
    """Of all machines that were measured."""
    return MeasuredErrors(**json.loads(FILE.read_text())["errors"])
