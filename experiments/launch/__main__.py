"""Train with a profile, in this process, no server: `launch_single_gpu.sh PROFILE [--setting value ...]`.

    MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb --dataset prompts.jsonl --max_steps 100
    MODEL_PATH=random:qwen3-0.6b ./launch_single_gpu.sh balanced --max_steps 2        # random weights, to try a card
    ./launch_single_gpu.sh fits.yaml --model_name_or_path hub:Qwen/Qwen3-8B           # downloads it
    accelerate launch --config_file experiments/settings/accelerate/fsdp2.yaml -m experiments.launch multi_gpu_70b

Any setting of TRL's trainer can follow the profile and replaces what it says. The training log shows memory
(`experiments.hooks.memory_callback.MemoryCallback`).
"""

import argparse
import difflib
import os
import sys

import yaml

from experiments import host_allocator
from experiments.config import ARMS, ROOT, ConfigError, exit_code
from experiments.launch.inputs import model_and_tokenizer, prompts, reward_function
from experiments.launch.offload import keep_on_host
from experiments.settings.arguments import LaunchArguments
from experiments.settings.profiles import fields, load_profile, profile_path


def asked_host_allocator(argv: list[str]) -> str:
    """`host_allocator` of the command line, else of the profile.

    Read before `parse`, because that imports torch and, with several processes, connects them: too late to start
    again. What is wrong with the command line or the profile, `parse` says.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--host_allocator", "--host-allocator")
    given = first.parse_known_args(argv[1:])[0].host_allocator
    if given is not None:
        return given
    try:
        settings = yaml.safe_load(profile_path(argv[0]).read_text())
    except (IndexError, OSError, yaml.YAMLError):
        settings = None
    return settings.get("host_allocator", "system") if isinstance(settings, dict) else "system"


def parse(argv: list[str]):
    """(launch arguments, trainer's config, model config). Raises `ConfigError` for what TRL would not accept."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError("name a profile first: ./launch_single_gpu.sh single_gpu_24gb [--setting value ...]")
    profile, overrides = argv[0], argv[1:]
    settings = load_profile(profile)
    known = fields()
    for word in overrides:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name.removeprefix("no_") not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"unknown setting {word!r}{f'; did you mean --{near[0]}?' if near else ''}")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--algorithm", default=settings.get("algorithm", "rloo"))
    algorithm = first.parse_known_args(overrides)[0].algorithm
    if algorithm not in ("rloo", "grpo"):
        raise ConfigError(f"algorithm {algorithm!r}: choose rloo or grpo")
    from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

    config_class = RLOOConfig if algorithm == "rloo" else GRPOConfig
    parser = TrlParser((LaunchArguments, config_class, ModelConfig))
    overrides = [*(["--use_cpu"] if no_gpu() and "--use_cpu" not in overrides else []), *overrides]
    try:
        launch, config, model = parser.parse_args_and_config(
            ["--config", str(profile_path(profile)), *overrides], fail_with_unknown_args=True
        )
    except ValueError as error:
        raise ConfigError(f"{profile}: {error}") from error
    model.model_name_or_path = os.environ.get("MODEL_PATH") or model.model_name_or_path
    if config.activation_offloading and no_gpu():
        raise ConfigError(
            f"{profile}: activation_offloading moves activations from a GPU to the host, and there is no GPU here; "
            "--activation_offloading false"
        )
    return launch, config, model


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    return exit_code("launch", run, sys.argv[1:] if argv is None else argv)


def run(argv: list[str]) -> int:
    host_allocator.activate(asked_host_allocator(argv), restart=argv == sys.argv[1:])
    # one write: the workers' lines would mix
    print(f"host allocator: {', '.join(host_allocator.mapped().values()) or 'system'}\n", end="", flush=True)
    from experiments.builds import use_fork

    use_fork(ARMS["shared"])
    launch, config, model = parse(argv)
    from experiments.hooks.memory_callback import MemoryCallback
    from trl import GRPOTrainer, RLOOTrainer, get_peft_config, get_quantization_config

    reward = reward_function(launch.reward)
    if launch.offload_reward and not isinstance(reward, str):
        raise ConfigError(f"offload_reward is on, but the reward {launch.reward!r} is a function; remove it")
    with config.main_process_first():  # it writes or downloads, the others find it
        folder = ROOT / ".build" / "models" / "random"
        path, tokenizer = model_and_tokenizer(model.model_name_or_path, folder, config.local_process_index == 0)
        dataset = prompts(launch, tokenizer)
    config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}
    if model.attn_implementation:
        config.model_init_kwargs["attn_implementation"] = model.attn_implementation
    if config.world_size > 1:  # with FSDP, TRL would have every process spread a whole reference over all GPUs
        config.model_init_kwargs.setdefault("device_map", None)
    trainer_class = RLOOTrainer if launch.algorithm == "rloo" else GRPOTrainer
    trainer = trainer_class(
        model=path,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        raise ConfigError("without a GPU accelerate would train with DDP in place of FSDP; use ddp.yaml")
    if launch.offload_reference:
        if trainer.ref_model is None:
            raise ConfigError("offload_reference is on, but there is no reference (beta is 0, or LoRA); remove it")
        keep_on_host(trainer, trainer.ref_model)
    if launch.offload_reward:
        keep_on_host(trainer, trainer.reward_funcs[0])
    trainer.add_callback(MemoryCallback(trainer, snapshot=launch.memory_snapshot))
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    if config.save_strategy != "no":
        if trainer.is_fsdp_enabled:  # checkpoints are shards; of shards alone, `save_model` would save nothing
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(config.output_dir)
    if trainer.is_world_process_zero():
        print(f"memory by phase: {config.output_dir}/memory_phases.csv, memory.json")
    trainer.accelerator.wait_for_everyone()  # gloo can abort a process that the others have left
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
