"""What was measured on a machine, as corrections of what is predicted for it.

`rloo-memory plan --calibrate RUN_DIR...` (`rloo_memory.plan.accuracy.calibrate`) writes one to
~/.local/share/rloo-memory/<machine>/calibration.json. A factor stands for what the planner predicts: on CUDA bytes
that torch allocates, on a CPU resident memory of the process above its level before the model was loaded.
"""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.models import typed_line
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.peaks import CORRECTION, PredictedPeak
from rloo_memory.sizes import GIB
from rloo_memory.storage import user_folder

ENOUGH = 3  # runs whose own spread is the range; of fewer it is widened by the planner's errors elsewhere
REACH = 4  # a peak so many times smaller or larger than the runs' is not corrected: their factor is not its
MATTERS = ("torch", "transformers")  # whose major and minor version a calibration holds for
HOW = "rloo-memory plan --calibrate RUN_DIR..."


@dataclass(frozen=True)
class Spread:
    """The lowest, the median and the highest of what `runs` runs showed."""

    low: float
    expected: float
    high: float
    runs: int


@dataclass(frozen=True)
class CalibratedPeak(PredictedPeak):
    """A corrected peak: `total` is what is expected, `low` to `high` the range that it stands for, bytes. `kinds` have
    the correction, which may be negative."""

    low: int
    high: int


@dataclass(frozen=True)
class Calibration:
    """Of one machine, from `runs`: each a dictionary of folder, start, commit and versions.

    `phases` are measured over predicted, by phase. Bytes: `predicted_peaks` the lowest and the highest predicted peak
    of the runs; `context` what is there besides tensors (CUDA: the device's use less what torch has reserved; a CPU:
    the process before the model), `reserve` what torch has reserved beyond the peak (CUDA); None: not known.
    """

    machine: str
    device_kind: str
    device_name: str
    date: str
    versions: dict[str, str]
    runs: tuple[dict, ...]
    phases: dict[str, Spread]
    predicted_peaks: tuple[int, int]
    context: Spread | None
    reserve: Spread | None
    file: str = ""

    def in_words(self) -> str:
        runs = f"{len(self.runs)} run{'s' if len(self.runs) != 1 else ''}"
        return f"calibrated with {runs} on {self.device_name} ({self.file})"

    @property
    def kept_bytes(self) -> int | None:
        """What a device's memory loses to all but tensors: the most that was seen."""
        if self.context is None or self.device_kind == "cuda" and self.reserve is None:
            return None
        return round(self.context.high + (self.reserve.high if self.reserve else 0))

    def reaches(self, phases) -> bool:
        """Whether the peak of these uncorrected phases is of a size that the runs tell something about."""
        peak, (least, most) = max(phase.total for phase in phases), self.predicted_peaks
        return least / REACH <= peak <= most * REACH

    def corrected(self, phases: list[PredictedPeak]) -> list[PredictedPeak]:
        """The same with the factor of each phase that has one; as they are where it does not reach."""
        return [self.corrected_phase(phase) for phase in phases] if self.reaches(phases) else list(phases)

    def corrected_phase(self, peak: PredictedPeak) -> PredictedPeak:
        if (factor := self.phases.get(peak.phase)) is None:
            return peak
        low, high = factor.low, factor.high
        if factor.runs < ENOUGH:
            errors = measured_errors()
            low, high = min(low, factor.expected * errors.low), max(high, factor.expected * errors.high)
        expected = round(peak.total * factor.expected)
        kinds = peak.kinds | {CORRECTION: expected - peak.total}
        return CalibratedPeak(
            peak.phase, expected, kinds, peak.host, round(peak.total * low), round(peak.total * high)
        )

    def said_of(self, predicted: dict[str, list[PredictedPeak]]) -> list[str]:
        """What to say of some predictions, by label: that they are corrected, and which of them are not."""
        least, most = (size / GIB for size in self.predicted_peaks)
        left = {
            label: max(phase.total for phase in phases) / GIB
            for label, phases in predicted.items()
            if not any(isinstance(phase, CalibratedPeak) for phase in phases)
        }
        lines = [self.in_words()] if len(left) < len(predicted) else []
        if left:
            named = ", ".join(f"{label} {size:.2f}" for label, size in left.items())
            lines.append(
                f"not calibrated: {named} GiB, more than {REACH} times off the {least:.2f} to {most:.2f} GiB "
                f"predicted for the runs of {self.file}; calibrate with a run of that size"
            )
        return lines

    def check(self, device_kind: str, remedy: str = "") -> None:
        """Raise `ConfigError` where its factors say nothing about such a device or these versions: they correct what
        the planner says of just that code. `remedy` is one more for another device."""
        if self.device_kind != device_kind:
            made, asked = ("a GPU", "a CPU") if self.device_kind == "cuda" else ("a CPU", "a GPU (CUDA)")
            raise ConfigError(
                f"{self.file} is of {made}, {self.device_name}, and this is a prediction for {asked}: their memory is "
                f"counted differently; name a calibration of such a device, or none{remedy}"
            )
        for package in MATTERS:
            here = version(package)
            if minor(here) != minor(self.versions[package]):
                raise ConfigError(
                    f"{self.file} is of {package} {self.versions[package]}, here is {here}, whose memory may be "
                    f"another; calibrate again with runs of {package} {minor(here)}, or leave the calibration out"
                )


def minor(text: str) -> str:
    """Major and minor version: 2.13 of 2.13.0+cpu."""
    return ".".join(text.split(".")[:2])


def range_of(phases) -> tuple[int, int, int]:
    """The lowest, the expected and the highest that the peak of some phases can be, bytes: by the calibration that
    they were corrected with, else by the errors that were measured elsewhere."""
    expected = max(phase.total for phase in phases)
    if any(isinstance(phase, CalibratedPeak) for phase in phases):
        low = max(getattr(phase, "low", phase.total) for phase in phases)
        return low, expected, max(getattr(phase, "high", phase.total) for phase in phases)
    low, high = measured_errors().range_of(expected)
    return low, expected, high


def may_exceed(stands_for: tuple[int, int, int], limit: int) -> bool:
    """Whether the highest of a range as `range_of` gives it is more than so many bytes."""
    return stands_for[2] > limit


def range_in_words(phases, calibration: Calibration | None) -> str:
    """What a predicted peak stands for, and why."""
    peak = max(phases, key=lambda phase: phase.total)
    if not isinstance(peak, CalibratedPeak):
        return measured_errors().in_words(peak.total)
    low, expected, high = (size / GIB for size in range_of(phases))
    factor = calibration.phases[peak.phase]
    wider = "" if factor.runs >= ENOUGH else f"; fewer than {ENOUGH} runs, so widened by the errors measured elsewhere"
    return (
        f"{expected:.2f} GiB stands for {low:.2f} to {high:.2f}: {peak.phase} took {factor.low:.2f} to "
        f"{factor.high:.2f} of the predicted {peak.uncorrected / GIB:.2f} GiB{wider}"
    )


def file_of(machine: str) -> Path:
    """Where a machine's calibration lies unless it is put elsewhere."""
    return user_folder("XDG_DATA_HOME", ".local/share") / machine / "calibration.json"


def as_json(calibration: Calibration) -> dict:
    return {name: value for name, value in asdict(calibration).items() if name != "file"}


def load(path: Path | str) -> Calibration:
    """Raises `ConfigError` for a file that is not there and for one that is no calibration."""
    path = Path(path)
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {path}: {error.strerror}; {HOW} writes one") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a calibration ({typed_line(error)}); {HOW} writes one") from error


def from_json(values: dict, file: str = "") -> Calibration:
    """Raises what Python raises for a file of another kind."""
    spreads = {name: values[name] and Spread(**values[name]) for name in ("context", "reserve")}
    phases = {phase: Spread(**spread) for phase, spread in values["phases"].items()}
    tuples = {name: tuple(values[name]) for name in ("runs", "predicted_peaks")}
    return Calibration(**{**values, **spreads, **tuples, "phases": phases, "file": file})
