"""What the launcher's own settings add to a trainer of TRL."""

from rloo_memory.launch.offload import keep_no_cache, offload_activations
from rloo_memory.sharing import share_prompts


def add(trainer) -> None:
    """What a trainer's config asks for, one of `settings.trl_parser`. Raises what `share_prompts` does."""
    config = trainer.args
    if config.prefix_sharing or config.tokens_per_forward is not None:
        share_prompts(trainer, config.tokens_per_forward, config.prefix_sharing)
    if config.activation_offloading:
        offload_activations(trainer)
    keep_no_cache(trainer.reward_funcs)
