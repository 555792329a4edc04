"""TRL's trainers with prompts shared as the launcher does it: by settings of their configs."""

import functools

from trl.trainer import utils

import trl
from rloo_memory.launch.additions import add_to
from rloo_memory.settings.trl_parser import GRPOConfig, RLOOConfig
from rloo_memory.sharing import forward_in_passes


def sharing(base):
    class Trainer(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            add_to(self)

        @property
        def passes(self):
            return self.prompt_sharing.passes

    Trainer.__name__ = Trainer.__qualname__ = base.__name__
    return Trainer


RLOOTrainer, GRPOTrainer = sharing(trl.RLOOTrainer), sharing(trl.GRPOTrainer)
TRAINERS = [(RLOOConfig, RLOOTrainer), (GRPOConfig, GRPOTrainer)]


def add_fused_lm_head(model, *args, **kwargs):
    """TRL's, with an argument `passes`: how the rows of this forward go through the model."""
    utils.add_fused_lm_head(model, *args, **kwargs)
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args, passes=None, **kwargs):
        return whole(*args, **kwargs) if passes is None else forward_in_passes(model, whole, passes, *args, **kwargs)

    model.forward = forward
