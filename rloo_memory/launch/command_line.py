"""The launcher's command line: a profile, settings that replace its own, and what of all that cannot work."""

import argparse
import os

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.installed_trl import wrong_on_cpu
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
    for name in ("host_allocator", "algorithm"):
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
    if path := os.environ.get("MODEL_PATH"):  # before the profile's, and what is typed before both
        words = ["--model_name_or_path", path, *words]
    parser = trl_parser.of(algorithm)
    parser.set_defaults(use_cpu=no_gpu())
    unknown = parser.set_defaults_with_config(**of_profile)[::2]
    try:
        launch, config, model, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"{profile}: {' '.join(str(error).split())}") from error
    if adapter := adapter_of(model.model_name_or_path):
        vars(model).update(adapter.settings_over(vars(model)))
    problems = [parser.unknown(word) for word in (*unknown, *rest) if word.startswith("--")]
    if rest and not problems:
        problems = [f"{', '.join(map(repr, rest))}: no setting; write --name value"]
    problems += wrong_values(vars(launch) | vars(config) | vars(model))
    if problems := problems or wrong_here(launch, config, model):
        raise ConfigError("; ".join(problems))
    if model.model_revision != "main":  # as TRL's scripts hand it on
        config.model_init_kwargs = {"revision": model.model_revision, **(config.model_init_kwargs or {})}
    return launch, config, model


def wrong_values(values: dict) -> list[str]:
    """A line for each number or word that a setting may not be, and for each text in place of a mapping."""
    from rloo_memory.settings.trl_parser import out_of_range

    texts = [
        f"{name} is {value!r}: it must be a mapping, such as '{{\"name\": 1}}'"
        for name, value in values.items()
        if name.endswith("_kwargs") and not isinstance(value, dict | None)
    ]
    return [line for name, value in values.items() if (line := out_of_range(name, value))] + texts


def wrong_here(launch, config, model) -> list[str]:
    """What settings ask for and a trainer or this machine does not have, where TRL would not say it in a line."""
    from transformers.integrations import get_available_reporting_integrations

    no_reference = config.beta == 0 or model.use_peft
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    settings = ("eval_strategy", "eval_on_start", "load_best_model_at_end")
    evaluating = [name for name in settings if getattr(config, name) not in (False, "no")]
    evaluating += ["save_strategy best"] if config.save_strategy == "best" else []
    reports = get_available_reporting_integrations()
    missing = {*config.report_to} - {*reports, "azure_ml", "flyte"}  # of which it does not say that they are here
    reasons = {
        "activation_offloading moves activations from a GPU to the host, and there is no GPU here; "
        "--activation_offloading false": vars(config).get("activation_offloading") and no_gpu(),
        f"memory_snapshot {launch.memory_snapshot!r} needs a GPU, and there is none here; leave it out":
            launch.memory_snapshot and no_gpu(),
        "offload_reference is on, but there is no reference (beta is 0, or LoRA needs none); remove it":
            launch.offload_reference and no_reference,
        f"load_in_{4 if model.load_in_4bit else 8}bit is on, and such weights cannot be trained themselves; add LoRA: "
        "--use_peft true": (model.load_in_4bit or model.load_in_8bit) and not model.use_peft,
        "calibration corrects a prediction, and predict_memory is false; leave out one of them":
            launch.calibration and not launch.predict_memory,
        "offload_reward is on, but there is no reward_model_name_or_path; a function has no weights; remove it":
            launch.offload_reward and not launch.reward_model_name_or_path,
        "offload_reference and offload_reward move whole models, and FSDP shards them: use fsdp2_offload.yaml instead":
            sharded and (launch.offload_reference or launch.offload_reward),
        f"{', '.join(evaluating)}: the launcher has no evaluation dataset; leave it out": evaluating,
        f"report_to {', '.join(sorted(missing))}: none of those that are installed here ({', '.join(reports)}); "
        "install it, or --report_to none": missing,
        wrong_on_cpu(): config.use_cpu,
    }  # fmt: skip
    return [problem for problem, applies in reasons.items() if problem and applies]


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()
