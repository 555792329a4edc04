"""Train with a profile, in this process, no server: `launch_single_gpu.sh PROFILE [--setting value ...]`.

    MODEL_PATH=/models/Qwen3-8B ./launch_single_gpu.sh single_gpu_24gb --dataset prompts.jsonl --max_steps 100
    MODEL_PATH=random:qwen3-0.6b ./launch_single_gpu.sh balanced --max_steps 2        # random weights, to try a card
    ./launch_single_gpu.sh fits.yaml --model_name_or_path hub:Qwen/Qwen3-8B           # downloads it
    accelerate launch --config_file experiments/accelerate/fsdp2.yaml -m experiments.launch multi_gpu_70b

Any setting of TRL's trainer can follow the profile and replaces what it says. The training log shows memory
(`experiments.callbacks.MemoryCallback`).
"""

import argparse
import difflib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments import host_allocator
from experiments.config import ARMS, ROOT, ConfigError, exit_code
from experiments.models import is_model, model_source
from experiments.profiles import fields, load_profile, profile_path


@dataclass
class LaunchArguments:
    """Settings that are not TRL's own.

    Args:
        algorithm: "rloo" or "grpo".
        dataset: "builtin", a .jsonl, .csv or .parquet file or a folder with a column `prompt`, or hub:owner/name.
        reward: "letters" (the number of letters e, to try things out), module:function as TRL takes it, or a reward
            model: its folder, or hub:owner/name.
        prompt_tokens: length of the built-in prompts.
        offload_reference: keep the reference model on the host except while it scores.
        offload_reward: the same with the reward model.
        memory_snapshot: "peak" or "oom", see `MemoryCallback`.
        host_allocator: "system", "tcmalloc" or "jemalloc": malloc for host memory, see `experiments.host_allocator`.
    """

    algorithm: str = "rloo"
    dataset: str = "builtin"
    reward: str = "letters"
    prompt_tokens: int = 256
    offload_reference: bool = False
    offload_reward: bool = False
    memory_snapshot: str | None = None
    host_allocator: str = "system"


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


def model_and_tokenizer(name: str | None, folder: Path, first: bool = True):
    """(path of the model, tokenizer). Raises `ConfigError`. Only hub: downloads. Of several processes, only the first
    one writes random weights to `folder`."""
    from transformers import AutoTokenizer

    if not name:
        raise ConfigError("no model: set MODEL_PATH, or model_name_or_path in the profile")
    if is_model(name):
        path = model_source(name)
        return path, AutoTokenizer.from_pretrained(path, padding_side="left")
    if not name.startswith("random:"):
        short = name.rsplit("/", 1)[-1].lower()
        raise ConfigError(
            f"model {name!r} is not a folder here; MODEL_PATH=hub:{name} downloads it, MODEL_PATH=random:{short} "
            "takes its shape with random weights"
        )
    if not first:
        return str(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    import torch
    from transformers import AutoModelForCausalLM

    from experiments import data, models

    hf_config = models.named_config(name.removeprefix("random:"))
    tokenizer = models.build_tokenizer(data.load_documents("builtin"), hf_config.vocab_size)
    hf_config.pad_token_id, hf_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


def prompts(launch: LaunchArguments, tokenizer):
    """The training set, with a column `prompt`. Raises `ConfigError`."""
    from datasets import Dataset, load_dataset

    from experiments import data

    source = launch.dataset
    if source == "builtin":
        return Dataset.from_dict(
            {"prompt": data.build_prompts(data.load_documents("builtin"), tokenizer, launch.prompt_tokens)}
        )
    if source.startswith("hub:"):
        dataset = load_dataset(source.removeprefix("hub:"), split="train")
    elif Path(source).exists():
        kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(source).suffix)
        dataset = load_dataset(kind, data_files=source, split="train") if kind else load_dataset(source, split="train")
    else:
        raise ConfigError(f"dataset {source!r} is not here; name a file, a folder, or hub:{source} to download it")
    if "prompt" not in dataset.column_names:
        raise ConfigError(f"dataset {source!r} has no column 'prompt'; it has {', '.join(dataset.column_names)}")
    return dataset


def reward_function(name: str):
    """The function that `module:function` names, or where a reward model is. Raises `ConfigError`."""
    from experiments.data import letter_reward

    if name == "letters":
        return letter_reward
    if is_model(name):
        return model_source(name)
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: {error}; write it as module:function, or name a folder") from error


def keep_on_host(trainer, model) -> None:
    """The reference or a reward model comes to the device when it is called and leaves it before the policy trains."""
    import torch
    from accelerate import cpu_offload_with_hook

    if trainer.is_fsdp_enabled:
        raise ConfigError("offloading moves a whole model, and FSDP shards it: use fsdp2_offload.yaml instead")
    model, hook = cpu_offload_with_hook(trainer.accelerator.unwrap_model(model).cpu(), trainer.accelerator.device)

    def before_forward(module, args):
        if torch.is_grad_enabled():
            hook.offload()

    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(before_forward)


def main(argv: list[str] | None = None) -> int:
    return exit_code("launch", run, sys.argv[1:] if argv is None else argv)


def run(argv: list[str]) -> int:
    host_allocator.activate(asked_host_allocator(argv), restart=argv == sys.argv[1:])
    # one write: the workers' lines would mix
    print(f"host allocator: {', '.join(host_allocator.mapped().values()) or 'system'}\n", end="", flush=True)
    from experiments.train import use_fork

    use_fork(ARMS["shared"])
    launch, config, model = parse(argv)
    from experiments.callbacks import MemoryCallback
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
