"""What was measured, for the planner to say: how far every results/<machine>/plan_check.csv was from the predictions,
and how many times as fast training was by every bench.csv of the measurement `worth`.

python -m experiments.checks.measured_ranges

writes rloo_memory/plan/accuracy/measured.json, which is installed with the planner.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from experiments.config import ROOT
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.plan.accuracy.measured import FILE, MeasuredErrors, TimesFaster
from rloo_memory.storage import write_json


def tables(results: Path, name: str, what: str, program: str) -> pd.DataFrame:
    """That table of all machines. Raises `ConfigError` where none has it."""
    found = [pd.read_csv(path).assign(machine=path.parent.name) for path in sorted(results.glob(f"*/{name}"))]
    if not found:
        raise ConfigError(f"{results} holds no */{name} with {what}; python -m experiments.{program} writes it")
    return pd.concat(found)


def errors_of(results: Path) -> MeasuredErrors:
    """Of the peaks that `experiments.checks.planner_check` measured on any machine. Raises `ConfigError`."""
    rows = tables(results, "plan_check.csv", "cases", "checks.planner_check")
    ratios, trainings = rows.measured_bytes / rows.predicted_bytes, rows[["machine", "case"]].drop_duplicates()
    devices = sorted({"cpu": "CPU", "cuda": "GPU"}[kind] for kind in rows.device_kind.unique())
    return MeasuredErrors(ratios.min(), ratios.max(), len(ratios), len(trainings), " and a ".join(devices))


def times_faster_of(results: Path) -> list[TimesFaster]:
    """Of medians of whole rows over those of each other way, by token ratio. Raises `ConfigError`."""
    rows = tables(results, "bench.csv", "worth", "bench worth")
    rows = rows[(rows.measurement == "worth") & (rows.metric == "train_seconds")]
    prompt, completion, k = rows.prompt_tokens, rows.completion_tokens, rows.k
    rows = rows.assign(ratio=(k * (prompt + completion) / (prompt + k * completion)).round(1))
    took = rows.pivot(
        index=["machine", "model", "prompt_tokens", "completion_tokens", "ratio"], columns="way", values="median"
    )
    times = took.drop(columns="whole").rdiv(took["whole"], axis=0).stack().groupby("ratio")
    low, high = times.min().round(3), times.max().round(3)
    return [TimesFaster(ratio, low[ratio], high[ratio]) for ratio in low.index]


def write(results: Path) -> int:
    times_faster = [asdict(each) for each in times_faster_of(results)]
    write_json(FILE, {"errors": asdict(errors_of(results)), "times_faster": times_faster})
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("measured_ranges", write, ROOT / "results"))
