"""The launcher's command line: a profile, settings that replace its own, and what of all that cannot work."""

import argparse
import os
from importlib.util import find_spec

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.settings.profiles import find_profile, load_profile, read_yaml


def split(argv: list[str]) -> tuple[str, list[str]]:
    """The profile, with or without `--config` before it as TRL's scripts have it, and the words behind it."""
    profile, *words = (argv[1:] if argv[:1] == ["--config"] else argv) or ["-"]
    if profile.startswith("-"):
        raise ConfigError(
            "name a profile first: rloo-memory launch single_gpu_24gb [--setting value ...]; --help lists them"
        )
    return profile, words


def read_first(words: list[str]) -> argparse.Namespace:
    """What of a command line decides how the rest is read; None for what it does not say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("host_allocator", "algorithm", "model_name_or_path"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?")
    return parser.parse_known_args(words)[0]


def host_allocator(argv: list[str]) -> str:
    """Known without torch: importing it takes seconds and, with several processes, connects them, too late to start
    again with another malloc."""
    profile, words = split(argv)
    of_profile, asked = read_yaml(find_profile(profile)), read_first(words).host_allocator
    return of_profile.get("host_allocator", "system") if asked is None else asked


def parse(argv: list[str]):
    """(launch arguments, trainer's config, model config). Raises `ConfigError` for what TRL does not accept or this
    machine lacks."""
    profile, words = split(argv)
    of_profile, first = load_profile(profile), read_first(words)
    from rloo_memory.settings import trl_parser

    algorithm = first.algorithm or of_profile.get("algorithm", "rloo")
    if problem := trl_parser.out_of_range("algorithm", algorithm):
        raise ConfigError(problem)
    if path := os.environ.get("MODEL_PATH"):
        if first.model_name_or_path not in (None, path):
            raise ConfigError(
                f"MODEL_PATH is {path!r} and --model_name_or_path {first.model_name_or_path!r}; leave one of them out"
            )
        words = [*words, "--model_name_or_path", path]
    parser = trl_parser.of(algorithm)
    parser.set_defaults(use_cpu=no_gpu())
    unknown = parser.set_defaults_with_config(**of_profile)[::2]
    try:
        launch, config, model, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        said = " ".join(str(error).split())
        if "generation_batch_size" in said:  # a name that nobody gave
            said += " It is per_device_train_batch_size x steps_per_generation; set --steps_per_generation as well."
        raise ConfigError(f"{profile}: {said}") from error
    if adapter := adapter_of(model.model_name_or_path):
        adapter.put_into(model)
    problems = [parser.unknown(word) for word in (*unknown, *rest) if word.startswith("--")]
    if rest and not problems:
        problems = [f"{', '.join(map(repr, rest))}: no setting; write --name value"]
    values = vars(launch) | vars(config) | vars(model)
    problems += [line for name, value in values.items() if (line := trl_parser.out_of_range(name, value))]
    if problems := problems or wrong_here(launch, config, model):
        raise ConfigError("; ".join(problems))
    return launch, config, model


def wrong_here(launch, config, model) -> list[str]:
    """What settings ask for and a trainer or this machine does not have."""
    dropout = model.use_peft and model.lora_dropout
    on_host = (launch.offload_reference and "offload_reference") or (launch.offload_reward and "offload_reward")
    no_reference = "LoRA needs none" if model.use_peft else "beta is 0"
    reasons = {
        "top_k is -1, which only vLLM takes for all tokens; --top_k 0": config.top_k == -1 and not config.use_vllm,
        f"calibration {launch.calibration!r} corrects the prediction, and predict_memory is off; remove one":
            launch.calibration and not launch.predict_memory,
        f"memory_snapshot {launch.memory_snapshot!r} needs a GPU, and there is none here; leave it out":
            launch.memory_snapshot and no_gpu(),
        "activation_offloading moves activations from a GPU to the host, and there is no GPU here; "
        "--activation_offloading false": config.activation_offloading and no_gpu(),
        "load_in_4bit and load_in_8bit need use_peft: quantized weights are frozen, adapters are trained; "
        "--use_peft true": (model.load_in_4bit or model.load_in_8bit) and not model.use_peft,
        f"attn_implementation {model.attn_implementation!r} does not take the mask that prefix_sharing needs; "
        "--attn_implementation sdpa":
            config.prefix_sharing and model.attn_implementation not in (None, "sdpa", "eager"),
        f"lora_dropout is {dropout}: completions that share a prompt would share its dropout; --lora_dropout 0 or "
        "--disable_dropout true": config.prefix_sharing and dropout and not config.disable_dropout,
        "use_vllm needs the package vllm, which is not installed: pip install vllm==0.30.0 (docs/launch.md); "
        "--use_vllm false": config.use_vllm and find_spec("vllm") is None,
        f"eval_strategy is {config.eval_strategy.value!r}, and there is no dataset to evaluate on; leave it out":
            config.eval_strategy != "no",
        f"offload_reference is on, but there is no reference ({no_reference}); remove it":
            launch.offload_reference and (config.beta == 0 or model.use_peft),
        "offload_reward is on, but there is no reward_model_name_or_path; a function has no weights; remove it":
            launch.offload_reward and not launch.reward_model_name_or_path,
        f"{on_host} moves a whole model, and FSDP shards it: use fsdp2_offload.yaml instead":
            on_host and os.environ.get("ACCELERATE_USE_FSDP") == "true",
    }  # fmt: skip
    return [problem for problem, applies in reasons.items() if applies]


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()
