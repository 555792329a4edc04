"""What sampling alone would have missed of a run's peak: the same run at several intervals."""

import tempfile
from pathlib import Path

from experiments import config as cfg
from experiments.bench.samples import Cell
from experiments.measuring import Place
from experiments.run_record import main_peak
from experiments.suite import run_one

INTERVALS = {"10 ms": 0.01, "50 ms": 0.05, "100 ms": 0.1}


class Sampled:
    """Runs of the arm `shared`, whose sampler works at one interval or another. `cell.model` is the scale."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        self.configs = {
            way: cfg.resolve("shared", cell.k, cell.model, here.device, interval=INTERVALS[way]) for way in ways
        }

    def sample(self, way: str) -> dict[str, float]:
        """By how much the highest sample lies below the peak that torch (CUDA) or the kernel (CPU, resident memory)
        counted, and how often the sampler really sampled. Raises RuntimeError where the run or its sampler fails."""
        with tempfile.TemporaryDirectory() as results:
            record = run_one(self.configs[way], Path(results, "here"))
        sampler = record["sampler"] or {"lost_after_s": 0}
        if record["status"] != "ok" or "lost_after_s" in sampler:
            raise RuntimeError("its sampler was lost" if record["status"] == "ok" else record["error"] or "oom")
        return {
            "achieved_interval_ms": 1000 * sampler["achieved_interval_s"],
            "longest_gap_ms": 1000 * sampler["longest_gap_s"],
            "missed_bytes": sampler["peak_missed_bytes"],
            "peak_bytes": main_peak(record)[0],
        }
