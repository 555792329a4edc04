"""Curves of a small model beside simulations of every pass, at lengths that they were not made from: a line of JSON
for each phase.

python -m tests.probes.fit_curves full|alternating ARM [CARDS]
"""

import json
import sys

from experiments.arms import ARMS
from experiments.builds import use_fork

use_fork(ARMS["shared"])

from trl.generation.shared_prefix_cache import MIN_NEW_STEPS  # noqa: E402

from experiments.fitting import fit_curves  # noqa: E402
from experiments.fitting.fit_data import on_cards  # noqa: E402
from rloo_memory import models  # noqa: E402
from rloo_memory.plan.scale_up import extrapolate  # noqa: E402
from rloo_memory.plan.setups import Setup  # noqa: E402
from rloo_memory.plan.simulation import replaced  # noqa: E402
from rloo_memory.plan.simulation.simulate import PHASES  # noqa: E402

WINDOW = 512
kind, arm, *cards = sys.argv[1:]
config, window = extrapolate.with_layers(models.shape_config("qwen3-8-layers", 4000), 2), None
if kind == "alternating":
    config, window = models.shape_config("gemma-3-1b", 4000), WINDOW
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    config.sliding_window, config.num_hidden_layers = WINDOW, 2
    config.layer_types = ["sliding_attention", "full_attention"]
print(json.dumps({"tile": replaced.head_tokens(), "room": MIN_NEW_STEPS}))

base = on_cards(Setup(prompt_tokens=1, lora_rank=8), int(cards[0]) if cards else 1)
curves = fit_curves.curves_of(base, config, arm, window)
# Long and short, few and many, where micro-batches share nothing, and where the window begins to hide something
EDGES = ((100, 4000, 64), (WINDOW, 100, 6), (WINDOW + 1, 200, 4))
for prompt, completion, k in ((9000, 700, 6), (200, 3000, 64), (900, 64, 128), *EDGES):
    setup = fit_curves.setup_at(base, arm, (prompt, completion, k))
    simulated = fit_curves.event_peaks(extrapolate.highest(extrapolate.simulate(setup, config, passes=True)))
    page = curves.peaks(prompt, completion, k)
    for phase in PHASES:
        sizes = {"simulated": simulated[phase], "page": extrapolate.on_device(page[phase])}
        print(json.dumps({"lengths": (prompt, completion, k), "phase": phase, **sizes}))
