"""A training whose numbers are no longer finite ends with a line, where TRL would train on, log a loss of 0, and save
it; one that goes on takes the learning rate that is asked for, where a checkpoint brings its own."""

import math

import torch
from transformers import TrainerCallback

from rloo_memory.errors import ConfigError
from rloo_memory.launch import output

SKIPPED = 20  # updates in a row that loss scaling leaves out: from 65,536, as many halvings bring it below 1


class Finite(TrainerCallback):
    """Raises `ConfigError` in the first update with gradients that are not finite, as it leaves no weight whole; with
    loss scaling, which leaves such updates out, in the last of `SKIPPED` ones. `grad_norms` are those of a
    `rloo_memory.phases.PhaseRecorder`."""

    def __init__(self, trainer, grad_norms):
        self.trainer, self.grad_norms, self.skipped = trainer, grad_norms, 0

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.skipped += 1
            wrong = self.skipped == SKIPPED
        else:
            self.skipped = 0
            *_, norms = self.grad_norms().values()
            wrong = not math.isfinite(norms[-1])
        if wrong:
            raise self.ended("gradients", args, state)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        weights = [weight.detach() for weight in model.parameters() if weight.requires_grad]
        if not math.isfinite(torch.nn.utils.get_total_norm(weights).item()):
            raise self.ended("weights", args, state)

    def ended(self, what: str, args, state) -> ConfigError:
        return ConfigError(
            f"the {what} are not finite in update {state.global_step}, so no model is written: lower learning_rate "
            f"{args.learning_rate:g}, or compute in a dtype with more range (bfloat16, float32), and "
            f"{output.going_on(args)}"
        )


class LearningRate(TrainerCallback):
    """Scales that of a checkpoint, wherever its schedule has come to."""

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate wraps it under DeepSpeed
        (old, *_), new = getattr(schedule, "base_lrs", [0]), args.learning_rate
        if old in (0, new):
            return
        schedule.base_lrs = [new for _ in schedule.base_lrs]
        for group in optimizer.param_groups:
            group["lr"] *= new / old
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]  # which is logged
        if state.is_world_process_zero:
            print(f"begins  with learning_rate {new:g} in place of the checkpoint's {old:g}", flush=True)
