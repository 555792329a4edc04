"""What was measured, for the planner to say: how far every results/<machine>/plan_check.csv was from the predictions.

python -m experiments.checks.measured_ranges

writes rloo_memory/plan/accuracy/measured.json, which is installed with the planner.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from experiments.config import ROOT
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, program
from rloo_memory.plan.accuracy.measured import FILE, MeasuredErrors
from rloo_memory.storage import write_json


def errors_of(results: Path) -> MeasuredErrors:
    """Of the peaks that `experiments.checks.planner_check` measured on any machine. Raises `ConfigError`."""
    found = [pd.read_csv(path).assign(machine=path.parent.name) for path in sorted(results.glob("*/plan_check.csv"))]
    if not found:
        raise ConfigError(f"{results} holds no */plan_check.csv; python -m experiments.checks.planner_check writes it")
    rows = pd.concat(found)
    ratios, trainings = rows.measured_bytes / rows.predicted_bytes, rows[["machine", "case"]].drop_duplicates()
    devices = sorted({"cpu": "CPU", "cuda": "GPU"}[kind] for kind in rows.device_kind.unique())
    return MeasuredErrors(ratios.min(), ratios.max(), len(ratios), len(trainings), " and a ".join(devices))


@program("measured_ranges")
def main(argv: list[str] | None) -> int:
    Parser("checks.measured_ranges", __doc__, place=False).parse_args(argv)
    write_json(FILE, {"errors": asdict(errors_of(ROOT / "results"))})
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
