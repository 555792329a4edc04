"""The rewards that a launched training is given: functions of the user's, of TRL's, and a reward model."""

import functools
import importlib
import inspect
import sys
from pathlib import Path

from rloo_memory.data import letter_reward
from rloo_memory.errors import ConfigError
from rloo_memory.models import is_model, model_source, one_line
from rloo_memory.settings.arguments import LaunchArguments

# What TRL calls a reward function with, besides the dataset's columns
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# TRL's own, under the names of its scripts
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}  # as TRL's scripts have it


def names_of(launch: LaunchArguments) -> list[str]:
    """The functions that are asked for; letters where nothing is."""
    return launch.reward_funcs or ([] if launch.reward_model_name_or_path else ["letters"])


def rewards_of(launch: LaunchArguments, columns: list[str]) -> list:
    """What TRL's trainers take: where the reward model is, then the functions, which it calls with all `columns` of
    the dataset. Raises `ConfigError`."""
    model = launch.reward_model_name_or_path
    if not launch.reward_funcs and not model and launch.dataset_name != "builtin":
        raise ConfigError(
            f"dataset {launch.dataset_name!r} is given and no reward; --reward_funcs module:function (docs/launch.md "
            "says how to write one), --reward_model_name_or_path FOLDER, or --reward_funcs letters to try things out"
        )
    if model and not is_model(model):
        raise ConfigError(f"reward model {model!r} is not a folder here; hub:{model} downloads it")
    functions = [function_of(name, columns) for name in names_of(launch)]
    return [model_source(model), *functions] if model else functions


def function_of(name: str, columns: list[str]):
    """The function of that name, which can be called as TRL will. Raises `ConfigError`."""
    if name == "letters":
        return letter_reward
    if name in OF_TRL:
        from trl import rewards

        found = getattr(rewards, name)
        return found(**OVERLONG) if name == "get_soft_overlong_punishment" else found
    found = imported(name)
    given = dict.fromkeys((*REWARD_ARGUMENTS, *(name for name in columns if name not in ("prompt", "completion"))))
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} cannot be called as TRL calls it: {error}; it gets {', '.join(given)}, each by name: "
            "def score(completions, **kwargs) -> list[float]"
        ) from error
    from trl.trainer.utils import is_async_callable

    return found if is_async_callable(found) else with_its_rewards_checked(name, found)


def imported(name: str):
    """What the name of a reward stands for. Raises `ConfigError` where importing it fails."""
    folder, module, function = place_of(name)
    if not module or not function:
        raise ConfigError(f"reward {name!r} is not module:function; docs/launch.md says how to write one")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # the module is the user's: its import may raise anything
        raise ConfigError(
            f"reward {name!r}: {type(error).__name__}: {one_line(error)}; modules are looked for in {folder} and on "
            f"PYTHONPATH, and `python -c 'import {module}'` shows where it ends"
        ) from error


def place_of(name: str) -> tuple[Path, str, str]:
    """(folder to import from, module, function) of module:function, module.function, rewards.py:function and
    /path/rewards.py:function."""
    module, colon, function = name.partition(":")
    if not colon and not module.endswith(".py"):
        module, _, function = name.rpartition(".")
    folder = Path.cwd()
    if module.startswith(("/", "~", "../")):
        folder, module = (folder / Path(module).expanduser().parent).resolve(), Path(module).name
    return folder, module.removesuffix(".py").removeprefix("./").replace("/", "."), function


def with_its_rewards_checked(name: str, function):
    """The reward function, which raises `ConfigError` for what it returns unless that is a finite number or None for
    each completion. TRL would leave out what is NaN as it does None, and train on nothing."""
    import torch

    @functools.wraps(function)
    def call(**given):
        rewards, count = function(**given), len(given["completions"])
        try:
            rewards = list(rewards)  # an iterator can be read once
            numbers = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
            wrong = numbers.shape != (count,) or not numbers.isfinite().all()
        except (TypeError, ValueError):  # what is no list, and what is no number
            wrong = True
        if wrong:
            raise ConfigError(
                f"the reward {name!r} returned {one_line(repr(rewards))}; TRL expects a list of {count} finite "
                "numbers, one a completion, or None to leave one out"
            )
        return rewards

    return call


def in_words(launch: LaunchArguments, rewards: list) -> str:
    """The names of the rewards, and where they come from."""
    model, names = launch.reward_model_name_or_path, names_of(launch)
    said = [f"reward model {model_source(model)}"] if model else []
    for name, function in zip(names, rewards[len(said) :], strict=True):
        said.append(f"{name} ({inspect.getmodule(function).__file__})")
    return ", ".join(said)
