"""The lines that the launcher prints when a training starts and when it ends."""

import os

from rloo_memory.sizes import GIB


def print_start(launch, model, trainer, lengths, reward: str) -> None:
    """What is trained on what, by which reward, how much at a time, where, and where the results go."""
    from rloo_memory.hooks.memory_callback import size_of

    config, parameters = trainer.args, list(trainer.model.parameters())
    trained = sum(size_of(weight) for weight in parameters if weight.requires_grad)
    weights = trainer.model.num_parameters() or sum(map(size_of, parameters))  # unpacked, or divided by ZeRO-3
    adapters = f"LoRA of rank {model.lora_r} trains {trained:,}" if model.use_peft else "all trained"
    dtype = str(trainer.model.dtype).removeprefix("torch.")
    print(f"model   {model.model_name_or_path}, {dtype}: {weights:,} weights, {adapters}")
    images = " with images" if lengths.images else ""
    among = "" if lengths.counted == len(trainer.train_dataset) else f" of the first {lengths.counted:,}"
    print(
        f"data    {launch.dataset_name}: {len(trainer.train_dataset):,} prompts{images}, the longest{among} "
        f"{lengths.longest:,} tokens, completions to {config.max_completion_length:,}"
    )
    print(f"reward  {reward}")
    print(f"passes  {passes(config)} ({launch.algorithm})")
    print(f"device  {config.world_size} x {config.device.type}")
    if share := rounded_away(trainer):
        print(
            f"weights in 16 bits most updates round to nothing: at learning_rate {config.learning_rate:g} one leaves "
            f"{100 * share:.0f} % of the weights as they are; dtype float32 trains them"
        )
    print(f"output  {os.path.abspath(config.output_dir)}", flush=True)


def rounded_away(trainer) -> float:
    """The share of 16-bit weights that a step of Adam, which is at most about the learning rate, leaves as they are,
    where it is most of them; otherwise 0. DeepSpeed and FSDP under autocast keep float32 weights beside them."""
    import torch

    config = trainer.args
    kept_in_float32 = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled and (config.bf16 or config.fp16)
    weights = [weight.detach().flatten() for weight in trainer.model.parameters() if weight.requires_grad]
    halves = [weight for weight in weights if weight.dtype in (torch.bfloat16, torch.float16) and weight.numel()]
    if not halves or "adam" not in config.optim or kept_in_float32:
        return 0.0
    some = torch.cat([weight[:: max(1, weight.numel() // 1000)] for weight in halves])  # enough for a share
    share = (some.abs() + config.learning_rate == some.abs()).float().mean().item()
    return share if share > 0.5 else 0.0


def passes(config) -> str:
    """How the completions of an update are divided."""
    batch, steps, devices = config.per_device_train_batch_size, config.gradient_accumulation_steps, config.world_size
    total, sharing = batch * steps * devices, "with" if config.prefix_sharing else "without"
    limit = f", at most {config.tokens_per_forward:,} tokens in a pass" if config.tokens_per_forward else ""
    return (
        f"{batch} completions x {steps} accumulated x {devices} devices = {total} an update, "
        f"{config.num_generations} a prompt, {sharing} prefix sharing{limit}"
    )


def print_end(trainer, memory, seconds: float) -> None:
    """How long it took, what became of the reward, the peak, and what was written where."""
    folder, state = trainer.args.output_dir, trainer.state
    rewards = [log["reward"] for log in state.log_history if log.get("reward") is not None]
    reward = f", reward {rewards[0]:.4g} at first, {rewards[-1]:.4g} at last" if rewards else ""
    print(f"trained {state.global_step} updates in {seconds:.1f} s{reward}")
    if memory.peaks:
        phase, highest = max(memory.peaks.items(), key=lambda peak: peak[1])
        what = "allocated on the device" if memory.cuda else "resident, the whole process"
        predicted = memory.of_launcher["predicted_peaks"].get(phase)
        beside = f"; predicted for it {predicted / GIB:.2f}{'' if memory.cuda else ' of tensors'}" if predicted else ""
        print(f"peak    {highest / GIB:.2f} GiB in phase {phase} ({what}){beside}")
    print(f"memory by phase: {folder}/memory_phases.csv, memory.json")
    print("no model written: save_strategy is no" if trainer.args.save_strategy == "no" else f"model: {folder}")
