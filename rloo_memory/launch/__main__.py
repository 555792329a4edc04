"""Train with a profile, in this process, no server: `rloo-memory launch PROFILE [--setting value ...]`.

    accelerate launch --config_file rloo_memory/settings/accelerate/fsdp2.yaml -m rloo_memory.launch multi_gpu_70b

Any setting of TRL's trainer can follow the profile and replaces what it says; `--help` lists profiles, the launcher's
own settings, formats and outputs. The training log shows memory (`rloo_memory.hooks.memory_callback.MemoryCallback`).
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rloo_memory import cuda_check, host_allocator
from rloo_memory.adapters import adapter_of
from rloo_memory.device import is_out_of_memory, level, settle, show_one_gpu
from rloo_memory.errors import ConfigError, Stopped, exit_code, leave
from rloo_memory.launch import (
    command_line,
    dataset,
    gate,
    help,
    model_limits,
    output,
    policy,
    prompt_images,
    quiet,
    rewards,
    vllm_server,
)
from rloo_memory.launch.announce import print_end, print_start
from rloo_memory.launch.offload import keep_on_host
from rloo_memory.models import one_line
from rloo_memory.settings.arguments import LaunchArguments


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(help.text(), end="")
        return 0
    # Several processes are ended by the program that started them, which does not wait for one that is in a collective
    stoppable = not one_of_several() and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if stoppable else None
    try:
        code = exit_code("launch", run, argv)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"launch: out of memory before the first update: {one_line(error)}", file=sys.stderr)
        code = 1
    finally:
        if stoppable:
            signal.signal(signal.SIGTERM, before)
    if one_of_several():
        leave(code)
    return code


def one_of_several() -> bool:
    """Whether this process was started with others that train with it."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def stop(number, frame):
    raise Stopped(number)


def run(argv: list[str]) -> int:
    settings = command_line.read(argv)
    launch, problems = command_line.launch_arguments(settings)
    host_allocator.activate(launch.host_allocator, restart=sys.argv[-len(argv) :] == argv)
    # one write: the workers' lines would mix
    print(f"host allocator: {', '.join(host_allocator.mapped().values()) or 'system'}\n", end="", flush=True)
    if not one_of_several() and (line := show_one_gpu()):
        print(f"gpus    {line}", flush=True)
    # torch would send attention to cuDNN on recent GPUs, which plans each length anew, so each decoded token
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less fragmentation on CUDA
    quiet.before_import()
    rows = command_line.before_torch(settings, launch, problems)

    from rloo_memory.fork import need_fork

    need_fork()
    config, model = command_line.parse(settings, launch)
    check_gpu(config, model)
    quiet.after_import()
    reward_funcs = rewards.rewards_of(launch, ["prompt"] if rows is None else rows.column_names)
    vllm_server.wait_for(config)
    with output.taken(config) as begin:
        if begin.finished:
            if config.process_index == 0:
                print(begin.finished)
            output.end_together()
            return 0
        return train_in_folder(argv[0], launch, config, model, rows, reward_funcs, begin)


def check_gpu(config, model) -> None:
    """Say it where a GPU stays unused. Raises `ConfigError` where TRL cannot train on it as it is asked to."""
    if config.device.type == "cuda":
        in_bf16 = "bfloat16" in (model.dtype, str((config.model_init_kwargs or {}).get("dtype")))
        half = " --dtype float16" if in_bf16 else ""
        cuda_check.check(config.bf16 or in_bf16, f"--bf16 false --fp16 true{half}")
    elif config.process_index == 0 and (why := cuda_check.unused_gpu()):
        print(f"device  the CPU: {why}", flush=True)


def train_in_folder(
    profile: str, launch: LaunchArguments, config, model, rows, reward_funcs: list, begin: output.Start
) -> int:
    """Read data and model, check them, train. Returns the exit code."""
    images = None if rows is None else prompt_images.column_of(rows)
    with config.main_process_first():  # it writes or downloads, the others find it
        path, tokenizer = policy.model_and_tokenizer(model.model_name_or_path, with_images=images is not None)
        if rows is None:
            rows = dataset.builtin_prompts(tokenizer, launch.prompt_tokens)
        if images and launch.reward_model_name_or_path:
            rewards.check_model_reads(reward_funcs[0])
        hf_config = model_limits.config_of(path, config.model_init_kwargs)
    quantization = policy.quantization_of(path, model)
    model_limits.check_special_tokens(hf_config, tokenizer, model.model_name_or_path)
    with dataset.named(launch.dataset_name):
        if images:
            prompt_images.check_gathered(rows, images, config)
        dataset.check_enough(rows, config)
        options = config.chat_template_kwargs or {}
        lengths = dataset.measure(rows, tokenizer, options, launch.max_prompt_tokens, images, hf_config)
        model_limits.check_positions(hf_config, lengths, config.max_completion_length, launch.anyway)
    named = model.model_name_or_path
    source = named if named.startswith("hub:") or adapter_of(named) else path
    predicted = gate.predicted_peaks(profile, launch, config, model, source, lengths)
    settle()
    start = level(config.device.type)
    trainer = build_trainer(launch, config, model, path, quantization, tokenizer, rows, reward_funcs)
    if trainer.is_world_process_zero():
        print_start(launch, model, trainer, lengths, rewards.in_words(launch, reward_funcs))
    return train(trainer, launch, predicted, lengths.images, start, begin)


def build_trainer(
    launch: LaunchArguments, config, model, path: str, quantization, tokenizer, rows, reward_funcs: list
):
    """The trainer, with the models that wait on the host. Raises `ConfigError` for what TRL or the fork refuses."""
    from trl import GRPOTrainer, RLOOTrainer, get_peft_config

    config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}
    if model.attn_implementation:
        config.model_init_kwargs["attn_implementation"] = model.attn_implementation
    if config.world_size > 1:  # with FSDP, TRL would have every process spread a whole reference over all GPUs
        config.model_init_kwargs.setdefault("device_map", None)
    try:
        adapter = adapter_of(model.model_name_or_path)
        trainer = (RLOOTrainer if launch.algorithm == "rloo" else GRPOTrainer)(
            model=policy.with_adapter(adapter.folder, path, config, quantization) if adapter else path,
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=None if adapter else get_peft_config(model),
            quantization_config=None if adapter else quantization,
        )
    except Exception as error:  # weights that are cut, a library that is not here: each loader raises its own
        if is_out_of_memory(error):
            raise
        where = "" if isinstance(error, ValueError) else f"cannot load {path!r}: "
        raise ConfigError(where + said(error)) from error
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        raise ConfigError("without a GPU accelerate would train with DDP in place of FSDP; use ddp.yaml")
    if launch.offload_reference:
        keep_on_host(trainer, trainer.ref_model)
    if launch.offload_reward:
        keep_on_host(trainer, trainer.reward_funcs[0])
    return trainer


def train(
    trainer,
    launch: LaunchArguments,
    predicted: gate.Forecast,
    images: tuple[tuple[int, int], ...],
    start: int,
    begin: output.Start,
) -> int:
    """Train and save; says what came out of it. `images` are those of a prompt, `start` the bytes in use before the
    model was loaded. Returns the exit code."""
    from rloo_memory.hooks.memory_callback import MemoryCallback, trained_settings

    config = trainer.args
    named = dataclasses.asdict(launch)
    says = begin.says
    if begin.checkpoint:
        model = trainer.accelerator.unwrap_model(trainer.model)
        settings, shape = trained_settings(config, model) | named, model.config.to_dict()
        other = output.decided_once(config, lambda: output.compare(begin.checkpoint, settings, shape))
        says = f"from {says}" + (f"; not as it was trained before: {other}" if other else "")
    if says and trainer.is_world_process_zero():
        print(f"begins  {says}", flush=True)
    memory = MemoryCallback(
        trainer,
        snapshot=launch.memory_snapshot,
        settings=named,
        predicted=predicted.peaks,
        predicted_prompt_tokens=predicted.prompt_tokens,
        calibrated=predicted.calibrated,
        images=images,
        start_bytes=start,
    )
    trainer.add_callback(memory)
    began = time.monotonic()
    try:
        train_and_save(trainer, begin.checkpoint)
    except KeyboardInterrupt as end:
        number = Stopped.number(end)
        kept = f"; {config.output_dir}/memory.json is kept" if Path(config.output_dir, "memory.json").exists() else ""
        print(f"launch: stopped by {number.name} after update {trainer.state.global_step}{kept}", file=sys.stderr)
        return 128 + number
    except ConfigError:  # of the reward
        raise
    except Exception as error:
        if memory.phases is None and not is_out_of_memory(error):  # the optimizer, the schedule, the checkpoint
            raise ConfigError(said(error)) from error
        if not is_out_of_memory(error):
            raise
        print(
            f"launch: out of memory in phase {memory.failed()} of update {trainer.state.global_step + 1}: "
            f"{one_line(error)}; rloo-memory doctor {config.output_dir} says what filled it",
            file=sys.stderr,
        )
        return 1
    if trainer.is_world_process_zero():
        print_end(trainer, memory, time.monotonic() - began)
    output.end_together()
    return 0


def said(error: Exception) -> str:
    """What a library says of a setting or a file, in one line; its refusals whole."""
    return " ".join(str(error).split()) if isinstance(error, ValueError) else one_line(error)


def train_and_save(trainer, checkpoint: str | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except BaseException:
        if not trainer.args.disable_tqdm:
            print(file=sys.stderr)  # the progress bar ends without a line's end
        raise
    if trainer.args.save_strategy != "no":
        if trainer.is_fsdp_enabled:  # checkpoints are shards; of shards alone, `save_model` would save nothing
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(trainer.args.output_dir)


if __name__ == "__main__":
    sys.exit(main())
