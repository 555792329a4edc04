"""TRL's trainers with prompts shared as the launcher does it: by settings of their configs."""

from datasets import Dataset, load_dataset

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
SMALL = dict(num_generations=3, max_completion_length=8, max_steps=1, report_to="none")  # of a config


def build_trainer(trainer_class, args, prompts=None, model="tiny-Qwen2ForCausalLM-2.5", reward_funcs=None, **options):
    """On these prompts, or those of `zen`. Rewards grow with the number of different characters, unless others are
    given."""
    prompts = prompts or list(load_dataset("zen", "standard_prompt_only", split="train")["prompt"])
    return trainer_class(
        model=model,
        reward_funcs=reward_funcs or (lambda completions, **_: [float(len(set(text))) for text in completions]),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **options,
    )
