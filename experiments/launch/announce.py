"""The lines that the launcher prints when a training starts and when it ends."""

import os
from pathlib import Path

from experiments.config import GIB


def print_start(launch, model, trainer, lengths, reward: str) -> None:
    """What is trained on what, by which reward, how much at a time, where, and where the results go."""
    from experiments.hooks.memory_callback import size_of

    config = trainer.args
    parameters = list(trainer.model.parameters())
    trained = sum(size_of(weight) for weight in parameters if weight.requires_grad)
    weights = trainer.model.num_parameters() - (trained if model.use_peft else 0)  # unpacks those of 4 bits
    weights += sum(size_of(weight) for weight in parameters if weight.numel() == 0)
    bits = " in 4 bits" if model.load_in_4bit else " in 8 bits" if model.load_in_8bit else ""
    adapters = f"LoRA of rank {model.lora_r} trains {trained:,}" if model.use_peft else "all trained"
    rows = len(trainer.train_dataset)
    among = "" if lengths.counted == rows else f" of the first {lengths.counted:,}"
    limit = f" (planned for {launch.max_prompt_tokens:,})" if launch.max_prompt_tokens else ""
    print(f"model   {model.model_name_or_path}, {trainer.model.dtype}{bits}: ".replace("torch.", ""), end="")
    print(f"{weights:,} weights, {adapters}")
    images = " with images" if lengths.images else ""
    print(f"data    {launch.dataset}: {rows:,} prompts{images}, the longest{among} {lengths.longest:,} tokens", end="")
    print(f"{limit}, completions to {config.max_completion_length:,}")
    print(f"reward  {reward}")
    print(f"passes  {passes(config)} ({launch.algorithm})")
    print(f"device  {devices(config)}")
    print(f"output  {os.path.abspath(config.output_dir)}", flush=True)


def passes(config) -> str:
    """How the completions of an update are divided."""
    k, batch = config.num_generations, config.per_device_train_batch_size
    if not config.prefix_sharing:
        text = f"{batch} rows together, k = {k}, no prefix sharing"
    else:
        at_once = "all together"
        if config.completions_per_forward:
            at_once = f"{config.completions_per_forward} together"
        elif config.tokens_per_forward:
            at_once = f"at most {config.tokens_per_forward:,} tokens together"
        if batch < k:
            what = f"{batch} of the k = {k} completions of a prompt"
        else:
            what = f"{batch} = {batch // k} whole group{'s' if batch > k else ''} of k = {k} completions"
        text = f"{what}, {at_once}"
    total = batch * config.gradient_accumulation_steps * config.world_size
    return (
        f"{text}; x {config.gradient_accumulation_steps} accumulated x {config.world_size} "
        f"device{'s' if config.world_size > 1 else ''} = {total // k} prompt{'s' if total // k > 1 else ''} an update"
    )


def devices(config) -> str:
    """Kind, number and size of the devices."""
    if config.device.type != "cuda":
        return f"{config.world_size} x {config.device.type}"
    import torch

    properties = torch.cuda.get_device_properties(config.device)
    return f"{config.world_size} x {properties.name}, {properties.total_memory / GIB:.0f} GiB"


def print_end(trainer, memory, seconds: float) -> None:
    """How long it took, what became of the reward, the peak, and what was written where."""
    config, state = trainer.args, trainer.state
    rewards = [log["reward"] for log in state.log_history if "reward" in log]
    moved = f", reward {rewards[0]:.4g} at first, {rewards[-1]:.4g} at last" if rewards else ""
    print(f"trained {state.global_step} update{'s' if state.global_step != 1 else ''} in {seconds:.1f} s{moved}")
    if memory.highest:
        what = "allocated on the device" if memory.cuda else "resident, the whole process"
        phase = memory.highest_phase
        predicted = memory.predicted.get(phase)
        beside = f"; predicted for it {predicted / GIB:.2f}" if predicted else ""
        beside += " of tensors" if predicted and not memory.cuda else ""
        if phase in memory.calibrated:
            beside += f", calibrated {memory.calibrated[phase] / GIB:.2f}"
            above = memory.highest - memory.start_bytes
            beside += "" if memory.cuda else f"; it is {above / GIB:.2f} above the level before the model"
        print(f"peak    {memory.highest / GIB:.2f} GiB in phase {memory.highest_phase} ({what}){beside}")
    print(f"memory by phase: {Path(config.output_dir, 'memory_phases.csv')}, memory.json")
    print("no model written: save_strategy is no" if config.save_strategy == "no" else f"model: {config.output_dir}")
