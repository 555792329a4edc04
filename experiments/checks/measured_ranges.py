"""What was measured, for the planner to say: how far every results/<machine>/plan_check.csv was from the predictions,
and how many times as fast training was by every bench.csv of the measurement `worth`.

python -m experiments.checks.measured_ranges

writes rloo_memory/plan/accuracy/measured.json, which is installed with the planner.
"""

import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.plan.accuracy.measured import FILE, MeasuredErrors, TimesFaster
from rloo_memory.storage import write_json


def errors_of(results: Path) -> MeasuredErrors:
    """Of the peaks that `experiments.checks.planner_check` measured on any machine. Raises `ConfigError`."""
    ratios, trainings, devices = [], set(), set()
    for path in sorted(results.glob("*/plan_check.csv")):
        for row in read_csv(path):
            ratios.append(int(row["measured_bytes"]) / int(row["predicted_bytes"]))
            trainings.add((path.parent, row["case"]))
            devices.add({"cpu": "CPU", "cuda": "GPU"}[row["device_kind"]])
    if not ratios:
        raise ConfigError(
            f"{results} holds no */plan_check.csv; python -m experiments.checks.planner_check writes one"
        )
    return MeasuredErrors(min(ratios), max(ratios), len(ratios), len(trainings), " and a ".join(sorted(devices)))


def times_faster_of(results: Path) -> list[TimesFaster]:
    """Of medians of whole rows over those of each other way, by token ratio. Raises `ConfigError`."""
    seconds = defaultdict(dict)  # of one cell: way -> median
    for path in sorted(results.glob("*/bench.csv")):
        for row in read_csv(path):
            if (row["measurement"], row["metric"]) == ("worth", "train_seconds"):
                prompt, completion, k = (int(row[name]) for name in ("prompt_tokens", "completion_tokens", "k"))
                ratio = round(k * (prompt + completion) / (prompt + k * completion), 1)
                seconds[path, row["model"], prompt, completion, ratio][row["way"]] = float(row["median"])
    if not seconds:
        raise ConfigError(f"{results} holds no */bench.csv with worth; python -m experiments.bench worth writes it")
    found = defaultdict(list)
    for (*_, ratio), of in seconds.items():
        found[ratio] += [of["whole"] / took for way, took in of.items() if way != "whole"]
    return [TimesFaster(ratio, round(min(of), 3), round(max(of), 3)) for ratio, of in sorted(found.items())]


def write(results: Path) -> int:
    write_json(
        FILE,
        {"errors": asdict(errors_of(results)), "times_faster": [asdict(each) for each in times_faster_of(results)]},
    )
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("measured_ranges", write, ROOT / "results"))
