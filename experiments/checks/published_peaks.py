"""The planner beside GPUs: what others have published that their trainings took, and what is predicted for them.

    python -m experiments.checks.published_peaks

Reads results/published/gpu_peaks.csv: one figure a row, with its source and the settings of the training in TRL's
names; configs of models that are no built-in shape are in results/published/models. Writes
results/published/predicted.csv: the same rows with the predicted bytes, the ratio, the bounds for it, and whether it
stays within. A row that says why it is not held (`not_held`) is predicted all the same, where the planner takes
it. Exit code 4: a row is outside of its bounds. It takes some four minutes.
"""

import json
import math
import sys
from collections import Counter

from experiments.commit import source_commit
from experiments.config import ROOT
from experiments.measuring import EXIT_VERDICT
from experiments.record import read_csv, write_csv
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, program
from rloo_memory.plan.accuracy.reserve import CONTEXT
from rloo_memory.plan.options import model_config, quiet
from rloo_memory.plan.peaks import Prediction
from rloo_memory.plan.predict import predict
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import from_settings
from rloo_memory.sizes import GIB

FOLDER = ROOT / "results" / "published"
ADDED = ("predicted_bytes", "ratio", "low", "high", "holds", "commit")


def bounds_of(metric: str, setup: Setup) -> tuple[float, float] | None:
    """The least and the most that measured over predicted may be; None for what the planner does not predict: a
    device's use, with the pool and other programs. Of small quantized weights, more of the peak comes and goes, which
    the pool grows with."""
    off, pool = 0.06 if setup.fully_sharded else 0.015, 1.5 if setup.weight_bits < 16 else 1.25
    return {
        "allocated": (1 - off, 1 + off),
        "after a step": (0.999, 1.001),  # weights, gradients, moments: bookkeeping
        "reserved": (1 - off if setup.fully_sharded else 1.0, pool),
        "allocated or reserved": (1 - off, pool),  # where a source does not say which
        "out of memory": (-math.inf, 1.0),  # the card's memory over what is predicted
    }.get(metric)


def setup_of(row: dict[str, str]) -> Setup:
    where = json.loads(row["where"] or "{}")
    return from_settings(int(row["prompt_tokens"]), json.loads(row["settings"]), **where).arm(row["arm"])


def predicted_for(row: dict[str, str], setup: Setup, known: dict) -> int:
    """Bytes that stand beside the measured ones: the highest phase, or the one that was measured."""
    key = setup, row["model"], row["text_only"]
    if key not in known:
        own = FOLDER / "models" / row["model"]
        hf_config = model_config(str(own) if own.exists() else row["model"])
        known[key] = predict(row["arm"], setup, hf_config.get_text_config() if row["text_only"] else hf_config)
    prediction: Prediction = known[key]
    phases = {phase.phase: phase.total for phase in prediction.phases}
    total = phases[row["phase"]] if row["phase"] else prediction.peak.total
    return total + (CONTEXT if row["metric"] == "out of memory" else 0)


def compared(row: dict[str, str], known: dict) -> dict:
    """The row with the columns of `ADDED` but the commit."""
    setup = setup_of(row)
    try:
        size, bounds = predicted_for(row, setup, known), bounds_of(row["metric"], setup)
    except ConfigError:
        if not row["not_held"]:
            raise
        return row | dict.fromkeys(ADDED[:-1], "")
    measured = float(row["measured_gib"]) - float(row["besides_gib"] or 0)
    ratio = measured * GIB / size
    holds = low = high = ""
    if bounds and not row["not_held"]:
        low, high = bounds
        holds, low = "yes" if low <= ratio <= high else "no", "" if low == -math.inf else low
    values = (size, f"{ratio:.4f}", low, high, holds)
    return row | dict(zip(ADDED[:-1], values, strict=True))


@program("published")
def main(argv: list[str] | None) -> int:
    Parser("checks.published_peaks", __doc__, place=False).parse_args(argv)
    rows, done, known, commit = read_csv(FOLDER / "gpu_peaks.csv"), [], {}, {"commit": source_commit()}
    with quiet():
        for row in rows:
            done.append(last := compared(row, known) | commit)
            about = f"{row['card']}: {row['model']}, {row['metric']}"
            print(f"{last['ratio']:6}  {last['holds'] or '-':3}  {about}", flush=True)
    write_csv(FOLDER / "predicted.csv", (*rows[0], *ADDED), done)
    held = Counter(row["holds"] for row in done)
    print(f"{len(done)} rows, {held['yes']} hold, {held['no']} do not")
    return EXIT_VERDICT if held["no"] else 0


if __name__ == "__main__":
    sys.exit(main())
