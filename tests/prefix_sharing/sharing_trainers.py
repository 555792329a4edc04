"""TRL's trainers with prompts shared as the launcher does it: by settings of their configs."""

import trl
from rloo_memory.launch.additions import add_to
from rloo_memory.settings.trl_parser import GRPOConfig, RLOOConfig


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
