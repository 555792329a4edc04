"""Memory of RLOO and GRPO training in TRL: predicted, measured, and less of it.

`from rloo_memory import share_prompts`: each prompt once for all its completions, in a trainer of TRL.
`from rloo_memory import log_probs, shared_prompts, logits_of`: the same in a loop of one's own.
"""

import importlib

_MODULES = {
    "share_prompts": "sharing",
    "log_probs": "own_loops",
    "shared_prompts": "own_loops",
    "logits_of": "prefix_sharing.lm_head",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # torch and TRL, which the commands look for first
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
