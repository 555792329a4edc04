"""The lines that the launcher prints when a training starts and when it ends."""

import os
from pathlib import Path

from rloo_memory.sizes import GIB


def print_start(launch, model, trainer, lengths, reward: str) -> None:
    """What is trained on what, by which reward, how much at a time, where, and where the results go."""
    import torch

    from rloo_memory.hooks.memory_callback import size_of

    config = trainer.args
    parameters = list(trainer.model.parameters())
    trained = sum(size_of(weight) for weight in parameters if weight.requires_grad)
    weights = trainer.model.num_parameters() - (trained if model.use_peft else 0)  # unpacks those of 4 bits
    weights += sum(size_of(weight) for weight in parameters if weight.numel() == 0)
    bits = " in 4 bits" if model.load_in_4bit else " in 8 bits" if model.load_in_8bit else ""
    dtype = str(trainer.model.dtype).removeprefix("torch.")
    adapters = f"LoRA of rank {model.lora_r} trains {trained:,}" if model.use_peft else "all trained"
    rows = len(trainer.train_dataset)
    among = "" if lengths.counted == rows else f" of the first {lengths.counted:,}"
    limit = f" (planned for {launch.max_prompt_tokens:,})" if launch.max_prompt_tokens else ""
    images = " with images" if lengths.images else ""
    print(f"model   {model.model_name_or_path}, {dtype}{bits}: {weights:,} weights, {adapters}")
    print(
        f"data    {launch.dataset_name}: {rows:,} prompts{images}, the longest{among} {lengths.longest:,} tokens"
        f"{limit}, completions to {config.max_completion_length:,}"
    )
    print(f"reward  {reward}")
    print(f"passes  {passes(config)} ({launch.algorithm})")
    device = config.device.type
    if device == "cuda":
        properties = torch.cuda.get_device_properties(config.device)
        device = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    print(f"device  {config.world_size} x {device}")
    if line := rounding(trainer, model):
        print(f"weights {line}")
    print(f"output  {os.path.abspath(config.output_dir)}", flush=True)


def rounding(trainer, model) -> str:
    """A line where most updates of weights in 16 bits round to nothing; nothing where they do not.

    Adam moves a weight by at most about the learning rate; a move of less than half the distance to the next number
    that the dtype has leaves the weight as it is. DeepSpeed and FSDP under autocast keep float32 weights beside them.
    """
    import torch

    config = trainer.args
    kept_in_float32 = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled and (config.bf16 or config.fp16)
    if "adam" not in config.optim or kept_in_float32:
        return ""
    lost = counted = 0
    for weight in trainer.model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16) and weight.numel():
            some = weight.detach().flatten()[:: max(1, weight.numel() // 1000)].float()  # enough for a share
            half_a_step = torch.finfo(weight.dtype).eps / 2 * 2.0 ** (torch.frexp(some)[1] - 1)
            lost += weight.numel() * (half_a_step > config.learning_rate).float().mean().item()
            counted += weight.numel()
    if lost <= counted / 2:
        return ""
    asked = (config.model_init_kwargs or {}).get("dtype")
    remedy = "--dtype float32" if asked == model.dtype else "dtype float32 in model_init_kwargs"
    return (
        f"in 16 bits most updates round to nothing: at learning_rate {config.learning_rate:g} "
        f"one leaves {100 * lost / counted:.0f} % of the weights as they are; {remedy} trains them"
    )


def passes(config) -> str:
    """How the completions of an update are divided."""
    k, batch, steps = config.num_generations, config.per_device_train_batch_size, config.gradient_accumulation_steps
    together = (
        f"in passes of at most {config.tokens_per_forward:,} tokens" if config.tokens_per_forward else "together"
    )
    what = f"{batch} of the k = {k} completions of a prompt"
    if batch >= k:
        what = f"{batch} = {batch // k} whole group{'s' if batch > k else ''} of k = {k} completions"
    text = f"{what} {together}" if config.prefix_sharing else f"{batch} rows together, k = {k}, no prefix sharing"
    total = batch * steps * config.world_size
    return (
        f"{text}; {batch} x {steps} accumulated x {config.world_size} device{'s' if config.world_size > 1 else ''} = "
        f"{total} completions of {total // k} prompt{'s' if total // k > 1 else ''} per update"
    )


def print_end(trainer, memory, seconds: float) -> None:
    """How long it took, what became of the reward, the peak, and what was written where."""
    config, state = trainer.args, trainer.state
    rewards = [log["reward"] for log in state.log_history if log.get("reward") is not None]
    reward = f", reward {rewards[0]:.4g} at first, {rewards[-1]:.4g} at last" if rewards else ""
    print(f"trained {state.global_step} update{'s' if state.global_step != 1 else ''} in {seconds:.1f} s{reward}")
    if memory.highest:
        what = "allocated on the device" if memory.cuda else "resident, the whole process"
        phase, beside = memory.highest_phase, ""
        if predicted := memory.predicted.get(phase):
            beside = f"; predicted for it {predicted / GIB:.2f}{'' if memory.cuda else ' of tensors'}"
        if phase in memory.calibrated:
            beside += f", calibrated {memory.calibrated[phase] / GIB:.2f}"
            above = memory.highest - memory.start_bytes
            beside += "" if memory.cuda else f"; it is {above / GIB:.2f} above the level before the model"
        print(f"peak    {memory.highest / GIB:.2f} GiB in phase {phase} ({what}){beside}")
    print(f"memory by phase: {Path(config.output_dir, 'memory_phases.csv')}, memory.json")
    print("no model written: save_strategy is no" if config.save_strategy == "no" else f"model: {config.output_dir}")
