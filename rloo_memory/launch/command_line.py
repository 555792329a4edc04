"""The launcher's command line and profile: what is asked for, and what of it cannot work."""

import argparse
import difflib
import math
import os
from importlib.util import find_spec

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.launch import dataset, inputs
from rloo_memory.settings.arguments import LaunchArguments
from rloo_memory.settings.profiles import at_odds, fields, find_profile, fits, load_profile, out_of_range, read_yaml


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
    defaults = {"algorithm": "rloo", "dataset": "builtin", "host_allocator": "system"}
    names = ("host_allocator", "dataset", "reward", "model_name_or_path", "algorithm")
    return read_words(argv, {name: settings.get(name, defaults.get(name)) for name in names})


def read_words(argv: list[str], defaults: dict) -> argparse.Namespace:
    """What the command line says of these settings, else their defaults. Raises `ConfigError`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in defaults.items():
        first.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default=default)
    try:
        return first.parse_known_args(argv[1:])[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error


def before_torch(argv: list[str], asked: argparse.Namespace):
    """Everything that can be seen without torch, all that is wrong in one line. Returns the training set, None for the
    built-in one."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            "name a profile first: rloo-memory launch single_gpu_24gb [--setting value ...]; --help lists them"
        )
    read_yaml(find_profile(argv[0]))
    problems, rows = two_models(argv), None
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


def two_models(argv: list[str]) -> list[str]:
    """What is wrong where the command line and the environment name different models: which one is meant?"""
    named = read_words(argv, {"model_name_or_path": None}).model_name_or_path
    path = os.environ.get("MODEL_PATH")
    if not path or named in (None, path):
        return []
    return [f"MODEL_PATH is {path!r} and --model_name_or_path {named!r}; leave one of them out"]


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
    given = given_values(overrides)
    # TRL divides by some of them
    numbers = {
        name: (int if fits(value, int) else float)(value) for name, value in given.items() if fits(value, float)
    }
    wrong = [said for name, value in numbers.items() if (said := out_of_range(name, value))]
    if wrong:
        raise ConfigError("; ".join(wrong))
    from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

    algorithm = asked_for(argv).algorithm
    parser = TrlParser((LaunchArguments, RLOOConfig if algorithm == "rloo" else GRPOConfig, ModelConfig))
    parser.error = refuse  # not a page of usage
    words = [*(["--use_cpu=true"] if no_gpu() and "--use_cpu" not in overrides else []), *overrides]
    try:
        launch, config, model, in_profile, stray = parser.parse_args_and_config(
            ["--config", str(find_profile(profile)), *words],
            return_remaining_strings=True,
            separate_remaining_strings=True,
        )
        for strange, where in ((in_profile, f"{profile}: "), (stray, "")):
            if strange:
                refuse(f"{where}{', '.join(map(repr, strange))}: no settings of {algorithm}; write --name value")
    except ConfigError:  # of the command line: not the profile's fault
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        said = " ".join(str(error).split())
        if "generation_batch_size" in said:  # a name that nobody gave
            said += " It is per_device_train_batch_size x steps_per_generation; set --steps_per_generation as well."
        with_it = f" with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{profile}{with_it}: {said}") from error
    model.model_name_or_path = os.environ.get("MODEL_PATH") or model.model_name_or_path
    if adapter := adapter_of(model.model_name_or_path):
        adapter.put_into(model)
    check_values(profile, launch, config, model, given)
    return launch, config, model


def refuse(message: str):
    raise ConfigError(message)


def given_values(words: list[str]) -> dict[str, str]:
    """The settings of a command line as text; one that is named without a value is on, one with `--no_` is off."""
    given = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):  # no words, no pair
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            off = name.startswith(("no_", "no-"))
            name = name[3 * off :].replace("-", "_")
            given[name] = value if equals else "false" if off else "true" if after.startswith("--") else after
    return given


def check_reporters(names) -> list[str]:
    """What is wrong with the names of `report_to`: unknown, or a package that is not installed."""
    from transformers.integrations import integration_utils

    known, here = integration_utils.INTEGRATION_TO_CALLBACK, integration_utils.get_available_reporting_integrations()
    problems = [
        f"report_to: {name} is not supported; choose none or some of {', '.join(sorted(known))}"
        for name in names
        if name not in known
    ]
    # of two transformers does not always say whether they are here
    return problems + [
        f"report_to: {name} is not installed; .venv/bin/python -m pip install {name}, or --report_to none"
        for name in names
        if name in set(known) - {"flyte", "azure_ml"} and name not in here
    ]


def check_values(profile: str, launch: LaunchArguments, config, model, given: dict) -> None:
    """Raise `ConfigError` for numbers out of range and for what this machine does not have, all of it in one line.
    `given` are the settings of the command line: what is wrong with others is the profile's."""
    values = {**vars(model), **vars(config), **vars(launch)}
    problems = [problem for name, value in values.items() if (problem := out_of_range(name, value))]
    floats = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    problems += [f"{name} is {value}: it must be a finite number" for name, value in floats.items()]
    problems += [
        f"generation_kwargs: {problem}"
        for name, value in (config.generation_kwargs or {}).items()
        if isinstance(value, int | float) and (problem := out_of_range(name, value))
    ]
    if config.top_k == -1 and not config.use_vllm:
        problems.append("top_k is -1, which only vLLM takes for all tokens; --top_k 0")
    problems += [problem for _, problem in at_odds(given, values)]
    problems += check_reporters(config.report_to)
    if launch.calibration not in (None, "none") and not launch.predict_memory:
        problems.append(
            f"calibration {launch.calibration!r} corrects the prediction, and predict_memory is off; remove one"
        )
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
    if config.prefix_sharing and model.attn_implementation not in (None, "sdpa", "eager"):
        problems.append(
            f"attn_implementation {model.attn_implementation!r} does not take the mask that prefix_sharing needs; "
            "--attn_implementation sdpa"
        )
    if config.prefix_sharing and model.use_peft and model.lora_dropout and not config.disable_dropout:
        problems.append(
            f"lora_dropout is {model.lora_dropout}: completions that share a prompt would share its dropout; "
            "--lora_dropout 0 or --disable_dropout true"
        )
    if config.use_vllm and find_spec("vllm") is None:
        problems.append(
            "use_vllm needs the package vllm, which is not installed: pip install vllm==0.30.0 (docs/launch.md); "
            "--use_vllm false"
        )
    if config.eval_strategy != "no":
        problems.append(
            f"eval_strategy is {config.eval_strategy.value!r}, and there is no dataset to evaluate on; leave it out"
        )
    if launch.offload_reference and (config.beta == 0 or model.use_peft):
        why = "LoRA needs none" if model.use_peft else "beta is 0"
        problems.append(f"offload_reference is on, but there is no reference ({why}); remove it")
    if (launch.offload_reference or launch.offload_reward) and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        problems.append("offloading moves a whole model, and FSDP shards it: use fsdp2_offload.yaml instead")
    if problems:
        said = [problem for problem in problems if {word.strip(":,;'") for word in problem.split()} & set(given)]
        in_file = "; ".join(problem for problem in problems if problem not in said)
        raise ConfigError("; ".join([*said, *([f"{profile}: {in_file}"] if in_file else [])]))


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()
