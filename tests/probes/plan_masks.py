"""Plans long prompts of a model whose masks hold a number for each query and key. Prints resident memory, in bytes.

python -m tests.probes.plan_masks ARM
"""

import resource
import sys

from rloo_memory import models
from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.setups import Setup

config = extrapolate.with_layers(models.named_config("openai/gpt-oss-20b"), 2)
rows = dict(prompt_tokens=60_000, max_completion_length=5000, num_generations=4, per_device_train_batch_size=4)
peaks = extrapolate.phase_peaks(Setup(**rows, lora_rank=8).arm(sys.argv[1]), config)
assert max(peak.total for peak in peaks) > 2 * rows["prompt_tokens"] ** 2, "masks are counted"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
