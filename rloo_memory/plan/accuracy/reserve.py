"""What a device's memory loses to all but tensors: CUDA's context, and what torch's allocator reserves and cannot use.

Published figures of GPUs (results/published/gpu_peaks.csv, without expandable segments) show a context of 0.15 to
0.20 GiB, and reserved beyond allocated 0.26 to 0.62 of what comes and goes: of all that is neither weights nor
gradients nor moments. When the device is full torch gives back what it can, so a training can fit with less.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rloo_memory.plan.peaks import VLLM, PredictedPeak
from rloo_memory.sizes import GIB

CONTEXT = round(0.2 * GIB)
# cuBLAS's, which torch allocates for the thread of the forward and for that of the backward: 32 MiB each on Hopper and
# Blackwell, 8 MiB on others (tests/cuda). No prediction counts them, and the card is not known: the larger ones
WORKSPACES = 64 * 2**20
OUTSIDE = CONTEXT + WORKSPACES
LIBRARIES = round(0.8 * GIB)  # on a CPU: Python, torch and others, assumed
STAYS = ("parameters", "reference", "reward model", "gradients", "optimizer state", VLLM)
# Of what comes and goes: the median of 15 published trainings. With expandable segments from torch's allocator on an
# emulated device (docs/measuring.md): a training that ran out of memory with 0.14 to spare trained with 0.27
FIXED, EXPANDABLE = 0.33, 0.25


@dataclass(frozen=True)
class Room:
    """What a device has for torch: `size` bytes, of which the allocator wastes `fragments` of what comes and goes, or
    none where that is taken off the size already. `device`: bytes of the whole device, 0 where it is not known, and
    `taken` off it, in words."""

    size: int
    fragments: float = 0.0
    device: int = field(default=0, compare=False)
    taken: str = field(default="", compare=False)

    def needed(self, phases: Iterable[PredictedPeak]) -> int:
        """Bytes that torch is expected to reserve for the highest phase."""
        return max(phase.total + round(self.fragments * comes_and_goes(phase)) for phase in phases)

    def holds(self, phases: Iterable[PredictedPeak]) -> bool:
        """Whether it fits with what the allocator wastes."""
        return self.needed(phases) <= self.size


def comes_and_goes(phase: PredictedPeak) -> int:
    return max(0, phase.total - sum(phase.kinds.get(kind, 0) for kind in STAYS))
