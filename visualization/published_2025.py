"""What was published in 2025 (TRL issue 3829): device-wide memory of an RTX 5090.

The monitor divided NVML's bytes by 1024 twice and the plots once more, so what was called GB are GiB: its total column
reads 32,607 MiB.
"""

import pandas as pd

from visualization.results import GIB

# Cells in GiB, NaN: out of memory. `start` is the last sample before the first step's rise, from the experiment's own
# file (github.com/luckyvickyricky/trl-rloo, results-prev/combined_gpu_memory.csv at dbd34d1)
PUBLISHED = pd.DataFrame(
    [
        ("classic-baseline", 2, 14.38, 1.84),
        ("classic-baseline", 4, 26.99, 1.95),
        ("classic-baseline", 8, None, 2.08),
        ("classic-string", 2, 6.40, 1.84),
        ("classic-string", 4, 11.01, 1.95),
        ("classic-string", 8, 20.25, 1.88),
    ],
    columns=["arm", "k", "peak", "start"],
)
PUBLISHED["above"] = PUBLISHED.peak - PUBLISHED.start
PUBLISHED_BUDGET = 32 * GIB
PUBLISHED_PROMPT = 3000  # tokens
