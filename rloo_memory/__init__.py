"""Memory of RLOO and GRPO training in TRL: predicted, measured, and less of it.

`from rloo_memory import share_prompts`: each prompt once for all its completions.
"""


def __getattr__(name: str):
    if name != "share_prompts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rloo_memory.sharing import share_prompts  # torch and TRL, which the commands look for first

    return share_prompts
