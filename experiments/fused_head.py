"""TRL's fused LM head, on a model by itself, for rows that go through it in passes, too."""

import functools

from trl.trainer import utils

from rloo_memory.sharing import forward_in_passes


def add_fused_lm_head(model, *args, **kwargs) -> None:
    """TRL's. The model's forward takes `passes`, which say how the rows of a call go through it."""
    utils.add_fused_lm_head(model, *args, **kwargs)
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args, passes=None, **kwargs):
        return whole(*args, **kwargs) if passes is None else forward_in_passes(model, whole, passes, **kwargs)

    model.forward = forward
