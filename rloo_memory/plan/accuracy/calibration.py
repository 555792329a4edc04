"""What one run measured on its machine, as a correction of what is predicted: a factor a phase."""

import json
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.models import typed_line
from rloo_memory.plan.peaks import CORRECTION, PredictedPeak


@dataclass(frozen=True)
class Calibration:
    """`factors` are measured over predicted, by phase, of the run whose output folder is `folder`. On CUDA of bytes
    that torch allocates, on a CPU of resident memory above its level before the model was loaded. `seconds` are those
    of an update, by phase."""

    folder: str
    factors: dict[str, float]
    seconds: dict[str, float]

    def corrected(self, peaks: list[PredictedPeak]) -> list[PredictedPeak]:
        return [
            peak.plus(CORRECTION, round(peak.total * self.factors[peak.phase]) - peak.total)
            if peak.phase in self.factors
            else peak
            for peak in peaks
        ]

    def in_words(self) -> str:
        factors = ", ".join(f"{phase} x {factor:.2f}" for phase, factor in self.factors.items())
        return f"corrected by what {self.folder} measured: {factors}"


def load(folder: Path | str, device: str) -> Calibration:
    """From an output folder of the launcher, for predictions of a "cuda" or "cpu" device. Raises `ConfigError` for a
    run that says nothing about them."""
    import pandas

    try:
        run = json.loads(Path(folder, "memory.json").read_text())
        return from_record(folder, run, pandas.read_csv(Path(folder, "memory_phases.csv")), device)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # cut, or of an older version
        why = error if isinstance(error, OSError) else f"no whole record ({typed_line(error)})"
        raise ConfigError(f"calibration {folder}: {why}; name an output folder of rloo-memory launch") from error


def from_record(folder: Path | str, run: dict, rows, device: str) -> Calibration:
    """From memory.json and the table of phases."""
    updates = rows.index[rows.phase == "optimizer"]
    reasons = {
        f"is a run on {run['device_kind']}, and the prediction is for {device}": run["device_kind"] != device,
        "has no predictions; train with --predict_memory true": not run.get("predicted_peaks"),
        "ran out of memory, so its peaks are not whole": run.get("out_of_memory"),
        "generated with vLLM, whose share no factor scales": run["settings"].get("use_vllm"),
        "has no measured update after the first, from which on the optimizer has its state": len(updates) < 2,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"calibration {folder} {reason}")
    lengths = (
        ("prompts", run["prompt_tokens"], run["predicted_prompt_tokens"]),
        ("completions", run["completion_tokens"], run["settings"]["max_completion_length"]),
    )
    for what, seen, planned in lengths:
        if (seen or 0) < 0.9 * planned:
            raise ConfigError(f"calibration {folder} saw {what} of {seen} tokens, and {planned} were predicted for")
    column, below = ("peak_allocated_bytes", 0) if device == "cuda" else ("peak_resident_bytes", run["start_bytes"])
    later, predicted = rows[rows.index > updates[0]], run["predicted_peaks"]
    measured = later.groupby("phase")[column].max() - below
    seconds = (later.end - later.start).groupby(later.phase).sum() / (len(updates) - 1)
    return Calibration(
        str(folder),
        {phase: measured[phase] / predicted[phase] for phase in predicted if phase in measured},
        seconds.to_dict(),
    )
