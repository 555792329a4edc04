"""Trains with the fork where transformers is older than sharing needs: 5.2, without the classes of caches that it
imports. Prints which modules of ours are imported by a training without the options, and what is said to each option.
"""

import json
import logging
import sys
import tempfile

import tiny
import transformers
from transformers import cache_utils

from experiments.arms import ARMS
from experiments.builds import use_fork

NEWER = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    use_fork(ARMS["shared"])
    transformers.__version__ = "5.2.0"
    for name in NEWER:
        delattr(cache_utils, name)
    result = {"said": []}
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_model().save_pretrained(folder)
        for trainer in ("RLOO", "GRPO"):
            tiny.build_trainer(trainer, folder, max_steps=1).train()
            for option in (dict(prefix_sharing=True), dict(tokens_per_forward=20)):
                try:
                    tiny.build_trainer(trainer, folder, **option)
                except ImportError as error:
                    result["said"].append(str(error))
    modules = [name for name in sys.modules if name.startswith(("trl.models.", "trl.generation."))]
    result["imported"] = sorted(name for name in modules if "prefix" in name or "passes" in name or "budget" in name)
    print(json.dumps(result))
