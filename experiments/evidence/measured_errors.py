"""The planner's errors, for the planner: what every results/<machine>/plan_check.csv measured beside a prediction.

python -m experiments.evidence.measured_errors

writes rloo_memory/plan/sureness/measured_errors.json, which is installed with the planner.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.plan.sureness.measured import FILE, MeasuredErrors
from rloo_memory.storage import write_json


def errors_of(results: Path) -> MeasuredErrors:
    """Of the peaks that `experiments.evidence.planner_check` measured on any machine. Raises `ConfigError`."""
    ratios, trainings, devices = [], set(), set()
    for path in sorted(results.glob("*/plan_check.csv")):
        for row in read_csv(path):
            ratios.append(int(row["measured_bytes"]) / int(row["predicted_bytes"]))
            trainings.add((path.parent, row["case"]))
            devices.add({"cpu": "CPU", "cuda": "GPU"}[row["device_kind"]])
    if not ratios:
        raise ConfigError(
            f"{results} holds no */plan_check.csv; python -m experiments.evidence.planner_check writes one"
        )
    return MeasuredErrors(min(ratios), max(ratios), len(ratios), len(trainings), " and a ".join(sorted(devices)))


def write(results: Path) -> int:
    write_json(FILE, asdict(errors_of(results)))
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("measured_errors", write, ROOT / "results"))
