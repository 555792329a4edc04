"""Peaks that the simulation extends from few layers and few passes, beside those of a whole simulation: one line a
setup and phase."""

from dataclasses import replace

from experiments.builds import use_fork
from experiments.config import ARMS

use_fork(ARMS["shared"])

from experiments.plan import extrapolate, simulate  # noqa: E402
from experiments.plan.setups import Setup  # noqa: E402
from experiments.workload import models  # noqa: E402

eight_layers = models.shape_config("qwen3-8-layers", 4000)
base = Setup(prompt_tokens=96, max_completion_length=16, num_generations=4, per_device_train_batch_size=4)
# The LM head's tile is small on a CPU: two passes fill it, so few tell what five take
many_passes = replace(base, device="cpu", max_completion_length=64).with_k(10)
setups = {
    "stock": (base, eight_layers),
    "shared-lora": (replace(base, lora_rank=8).arm("shared"), eight_layers),
    "passes": (many_passes.arm("shared"), extrapolate.with_layers(eight_layers, 2)),
}
for name, (setup, config) in setups.items():
    short = extrapolate.phase_peaks(setup, config)
    whole = extrapolate.highest(simulate.Simulation(setup, config).run())
    for peak in short:
        exact = max(extrapolate.on_device(kinds) for place, kinds in whole.items() if place[0] == peak.phase)
        print(name, peak.phase, peak.total, exact)
