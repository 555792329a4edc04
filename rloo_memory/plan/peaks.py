"""A predicted peak, and the peaks of a training."""

from collections import Counter
from dataclasses import dataclass, field, replace

from rloo_memory.plan.setups import Setup
from rloo_memory.sizes import GIB

CORRECTION = "correction"  # the kind of a peak that a calibration adds or takes away
VLLM = "vLLM"  # what it holds on the trainer's device, where it generates in place of transformers


@dataclass(frozen=True)
class PredictedPeak:
    """What a phase is predicted to hold at its peak, in bytes: on the device in all and by kind. `host` is the most
    that waits on the host, maybe at another moment. A measured one is `rloo_memory.phases.PhasePeak`."""

    phase: str
    total: int
    kinds: dict[str, int]
    host: int

    def plus(self, kind: str, size: int) -> "PredictedPeak":
        return replace(self, total=self.total + size, kinds=self.kinds | {kind: size})

    def parts(self) -> str:
        """The kinds that are more than half a percent of the peak, largest first, in GiB."""
        kinds = sorted(self.kinds.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds if size > 0.005 * self.total)


@dataclass(frozen=True)
class Prediction:
    """The peak of each phase of one setup, in bytes, and the `rloo_memory.plan.simulation.work.Work` of an update."""

    arm: str
    setup: Setup
    phases: list[PredictedPeak]
    work: dict[str, Counter] = field(default_factory=dict)

    @property
    def peak(self):
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def most_on_host(self) -> PredictedPeak:
        """The phase in which most waits on the host."""
        return max(self.phases, key=lambda phase: phase.host)
