"""What a device's memory loses to all but tensors: CUDA's context, and what torch's allocator reserves and cannot use.

Published figures of GPUs (results/published/gpu_peaks.csv, without expandable segments) show a context of 0.15 to
0.20 GiB, and reserved beyond allocated 0.25 to 0.60 of what comes and goes: of what is neither weights nor gradients
nor moments. Near the end of its memory torch gives back what it can (`torch.cuda.empty_cache`), so a training can fit
with less.
"""

from experiments.config import GIB
from experiments.plan.predict import PredictedPeak

CONTEXT = round(0.2 * GIB)
STAYS = ("parameters", "reference", "reward model", "gradients", "optimizer state")
# Of what comes and goes: the median of 15 published trainings; expandable segments: assumed, not measured
FRAGMENTS = {"fixed": 0.33, "expandable": 0.1}


def fragments(peak: PredictedPeak, segments: str = "fixed") -> int:
    """Bytes that torch is expected to have reserved beyond a phase's peak."""
    stays = sum(peak.kinds.get(kind, 0) for kind in STAYS)
    return round(FRAGMENTS[segments] * max(0, peak.total - stays))
