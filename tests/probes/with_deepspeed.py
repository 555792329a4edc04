"""DeepSpeed ZeRO-3 as the probes train with it, and what of it they look at."""

import deepspeed


def config(**settings):
    """DeepSpeed's settings. With thresholds of 0 no weight is too small to be divided."""
    thresholds = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",  # left out, it is 1, whatever the trainer's says
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own optimizer would be compiled first
        "zero_optimization": {"stage": 3, **thresholds, **settings},
    }


def full(parameter):
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
