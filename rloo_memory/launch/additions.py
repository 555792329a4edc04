"""What a launched trainer has beside TRL's: shared prompts, offloaded activations, and what TRL loses or leaves on."""

import functools

from rloo_memory.launch.offload import offload_activations
from rloo_memory.sharing import check_trained, checkpointing_enable, share_prompts


def add_to(trainer) -> None:
    """Do in a trainer as TRL makes it what the settings of `rloo_memory.settings.trl_parser` ask for beside TRL's.
    Raises a `ValueError` where nothing would be trained, or prompts cannot be shared."""
    args, model = trainer.args, trainer.model
    check_trained(model)
    if args.prefix_sharing or args.tokens_per_forward is not None:
        share_prompts(trainer, args.tokens_per_forward, args.prefix_sharing)
    else:
        whole = model.gradient_checkpointing_enable
        model.gradient_checkpointing_enable = functools.partial(checkpointing_enable, whole)
    if args.activation_offloading:
        offload_activations(trainer)
    for reward_func in trainer.reward_funcs:
        if hasattr(reward_func, "config"):  # a model, through which each row goes once: keys and values are of no use
            reward_func.config.get_text_config().use_cache = False
