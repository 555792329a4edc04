"""Curves of small models beside the planner at lengths that they were not made from: a line of JSON for each."""

import json
import sys

from experiments.builds import use_fork
from experiments.config import ARMS

use_fork(ARMS["shared"])

from experiments.plan import extrapolate, fit_curves, replaced  # noqa: E402
from experiments.plan.setups import Setup  # noqa: E402
from experiments.workload import models  # noqa: E402
from trl.generation.shared_prefix import MIN_NEW_STEPS  # noqa: E402

print(json.dumps({"tile": replaced.head_tokens("cuda"), "room": MIN_NEW_STEPS}))

full = extrapolate.with_layers(models.shape_config("qwen3-8-layers", 4000), 2)
alternating = models.shape_config("gemma-3-1b", 4000)
alternating.hidden_size, alternating.intermediate_size, alternating.head_dim = 256, 512, 64
alternating.sliding_window, alternating.num_hidden_layers = 512, 2
alternating.layer_types = ["sliding_attention", "full_attention"]
elsewhere = [(3000, 512, 8), (200, 3000, 16), (900, 64, 24), (9000, 700, 6)]
for name, config, window in (("full", full, None), ("alternating", alternating, 512)):
    for arm in sys.argv[1:] or fit_curves.ARMS:
        setup = Setup(prompt_tokens=1, lora_rank=8)
        lengths = fit_curves.simulated_lengths(arm, window)
        simulated = {each: fit_curves.stretches_at(setup, config, arm, each) for each in lengths}
        curves = fit_curves.fitted(arm, window, simulated)
        for each in elsewhere:
            stretches = fit_curves.stretches_at(setup, config, arm, each)
            error = fit_curves.relative_error(curves.peaks(*each), stretches)
            print(json.dumps({"model": name, "arm": arm, "lengths": each, "error": error, "fit": curves.error}))
