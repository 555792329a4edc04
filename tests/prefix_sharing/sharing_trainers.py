"""TRL's trainers with prompts shared as the launcher does it: by settings of their configs."""

import functools

import trl
from rloo_memory.launch import offload
from rloo_memory.settings.trl_parser import GRPOConfig, RLOOConfig
from rloo_memory.sharing import forward_in_passes, share_prompts
from trl.trainer import utils


def sharing(base):
    class Trainer(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self.args.prefix_sharing or self.args.tokens_per_forward is not None:
                share_prompts(self, self.args.tokens_per_forward, self.args.prefix_sharing)
            if self.args.activation_offloading:
                offload.offload_activations(self)
            offload.keep_no_cache(self.reward_funcs)

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
