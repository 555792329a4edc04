"""How far predictions were from what was measured, and so the range that a predicted size stands for.

The measured peaks are those of `experiments.evidence.planner_check` on any machine: results/<machine>/plan_check.csv.
"""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from experiments.config import GIB, ROOT


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

    def in_words(self, size: int) -> str:
        low, high = (x / GIB for x in self.range_of(size))
        return (
            f"{size / GIB:.2f} GiB stands for {low:.2f} to {high:.2f}: {self.peaks} measured peaks of "
            f"{self.trainings} small trainings on a {self.devices} were {self.low:.2f} to {self.high:.2f} of the "
            "predicted ones"
        )


@functools.cache
def measured_errors(results: Path = ROOT / "results") -> MeasuredErrors | None:
    """Of all machines; None where nothing was measured."""
    ratios, trainings, devices = [], set(), set()
    for path in sorted(results.glob("*/plan_check.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                ratios.append(int(row["measured_bytes"]) / int(row["predicted_bytes"]))
                trainings.add((path.parent, row["case"]))
                devices.add({"cpu": "CPU", "cuda": "GPU"}[row["device_kind"]])
    if not ratios:
        return None
    return MeasuredErrors(min(ratios), max(ratios), len(ratios), len(trainings), " and a ".join(sorted(devices)))
