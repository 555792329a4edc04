"""What was published in 2025 (TRL issue 3829): device-wide memory of an RTX 5090.

The monitor divided NVML's bytes by 1024 twice and the plots once more, so what was called GB are GiB: its total column
reads 32,607 MiB.
"""

from dataclasses import dataclass

from visualization.results import GIB


@dataclass(frozen=True)
class Published:
    """A cell in GiB, None: out of memory. `start_gib` is the last sample before the first step's rise, from the
    experiment's own file (github.com/luckyvickyricky/trl-rloo, results-prev/combined_gpu_memory.csv at dbd34d1)."""

    peak_gib: float | None
    start_gib: float

    @property
    def above_gib(self) -> float | None:
        return None if self.peak_gib is None else self.peak_gib - self.start_gib


PUBLISHED = {
    ("classic-baseline", 2): Published(14.38, 1.84),
    ("classic-baseline", 4): Published(26.99, 1.95),
    ("classic-baseline", 8): Published(None, 2.08),
    ("classic-string", 2): Published(6.40, 1.84),
    ("classic-string", 4): Published(11.01, 1.95),
    ("classic-string", 8): Published(20.25, 1.88),
}
PUBLISHED_BUDGET = 32 * GIB
PUBLISHED_PROMPT = 3000  # tokens
