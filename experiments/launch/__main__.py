"""Train with a profile, in this process, no server: `launch_single_gpu.sh PROFILE [--setting value ...]`.

    MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb --dataset prompts.jsonl --reward rewards:short
    MODEL_PATH=random:qwen3-0.6b ./launch_single_gpu.sh balanced --max_steps 2        # random weights, to try a card
    accelerate launch --config_file experiments/settings/accelerate/fsdp2.yaml -m experiments.launch multi_gpu_70b

Any setting of TRL's trainer can follow the profile and replaces what it says; `--help` lists profiles, the launcher's
own settings, formats and outputs. The training log shows memory (`experiments.hooks.memory_callback.MemoryCallback`).
"""

import argparse
import dataclasses
import difflib
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

from experiments import host_allocator
from experiments.config import ARMS, ConfigError, exit_code
from experiments.device import is_out_of_memory
from experiments.launch import dataset, help, inputs, quiet
from experiments.launch.offload import keep_on_host
from experiments.launch.summary import print_end, print_start
from experiments.settings.arguments import LaunchArguments
from experiments.settings.profiles import fields, find_profile, load_profile, out_of_range, read_yaml


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(help.text(), end="")
        return 0
    # Several processes are ended by the program that started them, which does not wait for one that is in a collective
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1 and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if alone else None
    try:
        return exit_code("launch", run, argv)
    except KeyboardInterrupt as stop:
        return stopped(stop, "before the first update")
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)


def interrupt(number, frame):
    raise KeyboardInterrupt(number)


def stopped(stop: KeyboardInterrupt, when: str) -> int:
    """Say it in one line; returns the exit code that a shell gives for the signal."""
    number = stop.args[0] if stop.args else signal.SIGINT
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(number, f"signal {number}")
    print(f"launch: stopped by {name} {when}", file=sys.stderr)
    return 128 + number


def run(argv: list[str]) -> int:
    asked = asked_for(argv)
    host_allocator.activate(asked.host_allocator, restart=argv == sys.argv[1:])
    # one write: the workers' lines would mix
    print(f"host allocator: {', '.join(host_allocator.mapped().values()) or 'system'}\n", end="", flush=True)
    quiet.before_import()
    rows = before_torch(argv, asked)

    from experiments.builds import use_fork

    use_fork(ARMS["shared"])
    launch, config, model = parse(argv)
    quiet.after_import()
    reward = inputs.reward_function(launch.reward, rows.column_names if rows else ["prompt"])
    if launch.offload_reward and not isinstance(reward, str):
        raise ConfigError(
            f"offload_reward is on, but the reward {launch.reward or 'letters'!r} is a function; remove it"
        )
    check_output(config)
    with config.main_process_first():  # it writes or downloads, the others find it
        path, tokenizer = inputs.model_and_tokenizer(model.model_name_or_path)
        if rows is None:
            rows = inputs.builtin_prompts(tokenizer, launch.prompt_tokens)
    lengths = dataset.measure(
        rows, tokenizer, config.chat_template_kwargs or {}, launch.max_prompt_tokens, launch.dataset
    )
    trainer = build_trainer(launch, config, model, path, tokenizer, rows, reward)
    if trainer.is_world_process_zero():
        print_start(launch, model, trainer, lengths, inputs.reward_in_words(launch.reward, reward))
    return train(trainer, launch, model)


def asked_for(argv: list[str]) -> argparse.Namespace:
    """What the command line, else the profile, says of the settings that are needed before torch is imported.

    Importing torch takes seconds and, with several processes, connects them: too late to start again with another
    malloc. What is wrong with other words of the command line or the profile, `parse` says.
    """
    settings = {}
    try:
        settings, _ = read_yaml(find_profile(argv[0]))
    except (IndexError, ConfigError):
        pass  # said by `before_torch`
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("host_allocator", "dataset", "reward", "model_name_or_path", "algorithm"):
        default = {"algorithm": "rloo", "dataset": "builtin", "host_allocator": "system"}.get(name)
        first.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default=settings.get(name, default))
    try:
        return first.parse_known_args(argv[1:])[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error


def before_torch(argv: list[str], asked: argparse.Namespace):
    """Everything that can be seen without torch, all that is wrong in one line. Returns the training set, None for the
    built-in one."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            "name a profile first: ./launch_single_gpu.sh single_gpu_24gb [--setting value ...]; --help lists them"
        )
    read_yaml(find_profile(argv[0]))
    problems, rows = [], None
    if asked.algorithm not in ("rloo", "grpo"):
        problems.append(f"algorithm {asked.algorithm!r}: choose rloo or grpo")
    texts = {"dataset": asked.dataset, "reward": asked.reward, "model_name_or_path": asked.model_name_or_path}
    wrong = [
        f"{name} is {value!r}: it must be text" for name, value in texts.items() if not isinstance(value, str | None)
    ]
    if wrong or asked.dataset is None:
        raise ConfigError("; ".join(wrong) or f"dataset is empty; name builtin, {dataset.FORMATS}")
    for check in (
        lambda: inputs.check_model(os.environ.get("MODEL_PATH") or asked.model_name_or_path),
        lambda: inputs.check_reward(asked.reward, asked.dataset),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if asked.dataset != "builtin":
        try:
            rows = dataset.load(asked.dataset)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return rows


def parse(argv: list[str]):
    """(launch arguments, trainer's config, model config). Raises `ConfigError` for what TRL would not accept."""
    profile, overrides = argv[0], argv[1:]
    load_profile(profile)
    known, unknown = fields(), []
    for word in overrides:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name.removeprefix("no_") not in known:
            near = difflib.get_close_matches(name, known, n=1)
            unknown.append(f"unknown setting {word!r}{f'; did you mean --{near[0]}?' if near else ''}")
    if unknown:
        raise ConfigError("; ".join(unknown))
    from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

    algorithm = asked_for(argv).algorithm
    parser = TrlParser((LaunchArguments, RLOOConfig if algorithm == "rloo" else GRPOConfig, ModelConfig))
    parser.error = refuse  # not a page of usage
    overrides = [*(["--use_cpu"] if no_gpu() and "--use_cpu" not in overrides else []), *overrides]
    try:
        launch, config, model = parser.parse_args_and_config(
            ["--config", str(find_profile(profile)), *overrides], fail_with_unknown_args=True
        )
    except ValueError as error:
        raise ConfigError(f"{profile}: {' '.join(str(error).split())}") from error
    model.model_name_or_path = os.environ.get("MODEL_PATH") or model.model_name_or_path
    check_values(profile, launch, config, model)
    return launch, config, model


def refuse(message: str):
    raise ConfigError(message)


def check_values(profile: str, launch: LaunchArguments, config, model) -> None:
    """Raise `ConfigError` for numbers out of range and for what this machine does not have, all of it in one line."""
    values = {**vars(model), **vars(config), **vars(launch)}
    problems = [problem for name, value in values.items() if (problem := out_of_range(name, value))]
    floats = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    problems += [f"{name} is {value}: it must be a finite number" for name, value in floats.items()]
    if launch.memory_snapshot not in (None, "peak", "oom"):
        problems.append(f"memory_snapshot is {launch.memory_snapshot!r}: choose peak or oom, or leave it out")
    elif launch.memory_snapshot and no_gpu():
        problems.append(
            f"memory_snapshot {launch.memory_snapshot!r} needs a GPU, and there is none here; leave it out"
        )
    if config.activation_offloading and no_gpu():
        problems.append(
            "activation_offloading moves activations from a GPU to the host, and there is no GPU here; "
            "--activation_offloading false"
        )
    if problems:
        raise ConfigError(f"{profile}: {'; '.join(problems)}")


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def check_output(config) -> None:
    """Make the output folder, and find the checkpoint to go on from. Raises `ConfigError`."""
    from transformers.trainer_utils import get_last_checkpoint

    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make output_dir {config.output_dir!r}: {error.strerror}; name another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to output_dir {config.output_dir!r}; name another folder")
    words = {"true": True, "false": None, False: None}
    config.resume_from_checkpoint = words.get(config.resume_from_checkpoint, config.resume_from_checkpoint)
    if config.resume_from_checkpoint is True and get_last_checkpoint(config.output_dir) is None:
        raise ConfigError(
            f"resume_from_checkpoint is on, and {config.output_dir!r} holds no checkpoint-N; leave it out"
        )
    if isinstance(config.resume_from_checkpoint, str) and not Path(config.resume_from_checkpoint).is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("checkpoint-*"))) or "no checkpoint"
        raise ConfigError(
            f"resume_from_checkpoint {config.resume_from_checkpoint!r} is no folder; {folder} holds {there}"
        )


def build_trainer(launch: LaunchArguments, config, model, path: str, tokenizer, rows, reward):
    """The trainer, with the models that wait on the host. Raises `ConfigError` for what TRL or the fork refuses."""
    from trl import GRPOTrainer, RLOOTrainer, get_peft_config, get_quantization_config

    config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}
    if model.attn_implementation:
        config.model_init_kwargs["attn_implementation"] = model.attn_implementation
    if config.world_size > 1:  # with FSDP, TRL would have every process spread a whole reference over all GPUs
        config.model_init_kwargs.setdefault("device_map", None)
    try:
        trainer = (RLOOTrainer if launch.algorithm == "rloo" else GRPOTrainer)(
            model=path,
            reward_funcs=reward,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=get_peft_config(model),
            quantization_config=get_quantization_config(model),
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        raise ConfigError("without a GPU accelerate would train with DDP in place of FSDP; use ddp.yaml")
    if launch.offload_reference:
        if trainer.ref_model is None:
            raise ConfigError("offload_reference is on, but there is no reference (beta is 0, or LoRA); remove it")
        keep_on_host(trainer, trainer.ref_model)
    if launch.offload_reward:
        keep_on_host(trainer, trainer.reward_funcs[0])
    return trainer


def train(trainer, launch: LaunchArguments, model) -> int:
    """Train and save; says what came out of it. Returns the exit code."""
    from experiments.hooks.memory_callback import MemoryCallback

    config = trainer.args
    named = {"model_name_or_path": model.model_name_or_path, **dataclasses.asdict(launch)}
    memory = MemoryCallback(trainer, snapshot=launch.memory_snapshot, settings=named)
    trainer.add_callback(memory)
    began = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    except KeyboardInterrupt as stop:
        kept = f"; {config.output_dir}/memory.json is kept" if Path(config.output_dir, "memory.json").exists() else ""
        end_progress_bar(config)
        return stopped(stop, f"after update {trainer.state.global_step}{kept}")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        phase = memory.failed()
        end_progress_bar(config)
        print(
            f"launch: out of memory in phase {phase} of update {trainer.state.global_step + 1}: "
            f"{dataset.one_line(error)}; python -m experiments.plan.doctor {config.output_dir} says what filled it",
            file=sys.stderr,
        )
        return 1
    if config.save_strategy != "no":
        if trainer.is_fsdp_enabled:  # checkpoints are shards; of shards alone, `save_model` would save nothing
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(config.output_dir)
    if trainer.is_world_process_zero():
        print_end(trainer, memory, time.monotonic() - began)
    trainer.accelerator.wait_for_everyone()  # gloo can abort a process that the others have left
    trainer.accelerator.end_training()
    return 0


def end_progress_bar(config) -> None:
    if not config.disable_tqdm:
        print(file=sys.stderr)  # it ends without a line's end


if __name__ == "__main__":
    sys.exit(main())
