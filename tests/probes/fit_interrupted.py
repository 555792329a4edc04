"""`fit_data` with FOLDER in place of .build and docs, for one model and made-up, slow simulations."""

import sys
import time
from pathlib import Path

from experiments.arms import ARMS
from experiments.builds import use_fork

use_fork(ARMS["shared"])

from experiments.fitting import fit_curves, fit_data  # noqa: E402
from rloo_memory.plan.simulation.simulate import PHASES  # noqa: E402

folder = Path(sys.argv[1])
fit_data.PARTS, fit_data.PAGE, fit_data.MODELS = folder / "parts", folder / "fit.json", ("Qwen/Qwen3-0.6B",)
fit_data.ROOT = folder


def stretches_at(setup, hf_config, passes=True):
    time.sleep(0.02)
    return {
        (phase, "start", None, "early"): {
            "activations": 1000 * setup.prompt_tokens * (phase == "train"),
            "parameters": 10**6,
        }
        for phase in PHASES
        if passes or phase in ("load", "generate")
    }


fit_curves.stretches_at = stretches_at
sys.exit(fit_data.main(sys.argv[2:]))
