"""A training that goes on takes the learning rate that is asked for; a checkpoint brings its own."""

from transformers import TrainerCallback


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
