"""The launcher's command line: a profile, settings that replace its own, and what of all that cannot work."""

import os
from importlib.util import find_spec

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.launch import dataset, policy, rewards
from rloo_memory.settings import grammar
from rloo_memory.settings.arguments import LaunchArguments
from rloo_memory.settings.grammar import Settings
from rloo_memory.settings.profiles import read_profile


def read(argv: list[str]) -> Settings:
    """The settings of the profile that is named first, under those of the words after it and under MODEL_PATH. Raises
    `ConfigError`."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            "name a profile first: rloo-memory launch single_gpu_24gb [--setting value ...]; --help lists them"
        )
    settings, words = read_profile(argv[0]), values_of(argv[1:])
    if path := os.environ.get("MODEL_PATH"):
        named = words.setdefault("model_name_or_path", path)
        if named != path:
            raise ConfigError(f"MODEL_PATH is {path!r} and --model_name_or_path {named!r}; leave one of them out")
    return settings.under(words)


def values_of(words: list[str]) -> dict:
    """The settings of a command line: text, a list of several texts, true for one without a value, false for one with
    `--no_` before its name. Raises `ConfigError` for a word that belongs to none."""
    given: dict[str, list[str]] = {}
    open_list, stray = None, []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            open_list = ["false"] if name.startswith("no_") else [value] * len(equals)
            given[name.removeprefix("no_")] = open_list
        elif open_list is None:
            stray.append(repr(word))
        else:
            open_list.append(word)
    if stray:
        raise ConfigError(f"{', '.join(stray)}: no setting; write --name value")
    return {name: True if not found else found[0] if len(found) == 1 else found for name, found in given.items()}


def launch_arguments(settings: Settings) -> tuple[LaunchArguments, list[tuple[str, str]]]:
    """What is trained on what, read without torch: importing it takes seconds and, with several processes, connects
    them, too late to start again with another malloc. With it what is wrong, as `Settings.refuse` takes it."""
    known = grammar.types_of(LaunchArguments)
    own = {name: value for name, value in settings.values.items() if name in known or name in grammar.REPLACED}
    values, problems = grammar.checked(Settings(settings.source, own, settings.lines), known)
    return grammar.made(LaunchArguments, values), problems


def before_torch(settings: Settings, launch: LaunchArguments, problems: list[tuple[str, str]]):
    """All else that can be seen without torch; what is wrong comes in one line. Returns the training set, None for the
    built-in one."""
    rows, wrong, problems = None, {name for name, _ in problems}, list(problems)
    for name, check in (
        ("model_name_or_path", lambda: policy.check(launch.model_name_or_path)),
        ("reward_funcs", lambda: rewards.check(launch)),
        ("dataset_name", lambda: dataset.load(launch)),
    ):
        try:
            rows = None if name in wrong else check()
        except ConfigError as error:
            problems.append((name, str(error)))
    settings.refuse(problems)
    return rows


def parse(settings: Settings, launch: LaunchArguments):
    """(trainer's config, model config). Raises `ConfigError` for what TRL does not accept or this machine lacks."""
    values, problems = grammar.checked(settings, grammar.fields())
    settings.refuse(problems + grammar.at_odds(values, settings.lines))
    classes = grammar.trainer_classes(launch.algorithm)
    known = {name for cls in (LaunchArguments, *classes) for name in grammar.types_of(cls)}
    settings.refuse([(name, f"{name}: no setting of {launch.algorithm} here") for name in values if name not in known])
    try:
        config, model_config = (grammar.made(cls, {"use_cpu": no_gpu(), **values}) for cls in classes)
    except (ValueError, TypeError, ImportError, OSError) as error:
        said = " ".join(str(error).split())
        if "generation_batch_size" in said:  # a name that nobody gave
            said += " It is per_device_train_batch_size x steps_per_generation; set --steps_per_generation as well."
        raise ConfigError(f"{settings.source}: {said}") from error
    if adapter := adapter_of(model_config.model_name_or_path):
        adapter.put_into(model_config)
    settings.refuse(wrong_here(launch, config, model_config))
    return config, model_config


def wrong_here(launch: LaunchArguments, config, model_config) -> list[tuple[str, str]]:
    """(setting, what is wrong) of what settings ask for and a trainer or this machine does not have."""
    attention, dropout = model_config.attn_implementation, model_config.use_peft and model_config.lora_dropout
    on_host = (launch.offload_reference and "offload_reference") or (launch.offload_reward and "offload_reward")
    no_reference = "LoRA needs none" if model_config.use_peft else "beta is 0"
    reasons = {
        "top_k is -1, which only vLLM takes for all tokens; --top_k 0": config.top_k == -1 and not config.use_vllm,
        f"calibration {launch.calibration!r} corrects the prediction, and predict_memory is off; remove one":
            launch.calibration and not launch.predict_memory,
        f"memory_snapshot {launch.memory_snapshot!r} needs a GPU, and there is none here; leave it out":
            launch.memory_snapshot and no_gpu(),
        "activation_offloading moves activations from a GPU to the host, and there is no GPU here; "
        "--activation_offloading false": config.activation_offloading and no_gpu(),
        f"attn_implementation {attention!r} does not take the mask that prefix_sharing needs; "
        "--attn_implementation sdpa": config.prefix_sharing and attention not in (None, "sdpa", "eager"),
        f"lora_dropout is {dropout}: completions that share a prompt would share its dropout; --lora_dropout 0 or "
        "--disable_dropout true": config.prefix_sharing and dropout and not config.disable_dropout,
        "use_vllm needs the package vllm, which is not installed: pip install vllm==0.30.0 (docs/launch.md); "
        "--use_vllm false": config.use_vllm and find_spec("vllm") is None,
        f"eval_strategy is {config.eval_strategy.value!r}, and there is no dataset to evaluate on; leave it out":
            config.eval_strategy != "no",
        f"offload_reference is on, but there is no reference ({no_reference}); remove it":
            launch.offload_reference and (config.beta == 0 or model_config.use_peft),
        "offload_reward is on, but there is no reward_model_name_or_path; a function has no weights; remove it":
            launch.offload_reward and not launch.reward_model_name_or_path,
        f"{on_host} moves a whole model, and FSDP shards it: use fsdp2_offload.yaml instead":
            on_host and os.environ.get("ACCELERATE_USE_FSDP") == "true",
    }  # fmt: skip
    wrong = [problem for problem, applies in reasons.items() if applies]
    wrong += [f"report_to: {problem}" for problem in wrong_reporters(config.report_to)]
    for name, value in (config.generation_kwargs or {}).items():
        if isinstance(value, int | float) and (problem := grammar.out_of_range(name, value)):
            wrong.append(f"generation_kwargs: {problem}")
    return [(problem.split()[0].strip(":"), problem) for problem in wrong]


def wrong_reporters(names) -> list[str]:
    """What is wrong with the names of `report_to`: unknown, or a package that is not installed."""
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    # of two transformers does not always say whether they are here
    here = {*integration_utils.get_available_reporting_integrations(), "flyte", "azure_ml"}
    problems = []
    for name in names:
        if name not in known:
            problems.append(f"{name} is not supported; choose none or some of {', '.join(sorted(known))}")
        elif name not in here:
            problems.append(f"{name} is not installed; .venv/bin/python -m pip install {name}, or --report_to none")
    return problems


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()
