"""The rewards that a launched training is given: functions of the user's, of TRL's, and a reward model."""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
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
    if names_of(launch) and (own := [column for column in columns if column in REWARD_ARGUMENTS]):
        raise ConfigError(
            f"dataset {launch.dataset_name!r} has the column {own[0]!r}, and a reward gets TRL's own {own[0]} under "
            "that name; rename the column"
        )
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
    except (TypeError, ValueError) as error:  # the latter of compiled code, which may not say what it takes
        raise ConfigError(
            f"reward {name!r} cannot be called as TRL calls it: {error}; it gets {', '.join(given)}, each by name: "
            "def score(completions, **kwargs) -> list[float]"
        ) from error
    return with_its_rewards_checked(name, found)


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
    """The reward function, asynchronous if it is, which raises `ConfigError` for what it returns unless that is a
    finite number or None for each completion. TRL would leave out what is NaN as it does None, and train on
    nothing."""
    from trl.trainer.utils import is_async_callable

    @functools.wraps(function)
    def call(**given):
        with letting_it_return(name):
            return checked(name, function(**given), len(given["completions"]))

    @functools.wraps(function)
    async def call_later(**given):
        with letting_it_return(name):
            return checked(name, await function(**given), len(given["completions"]))

    return call_later if is_async_callable(function) else call


@contextlib.contextmanager
def letting_it_return(name: str) -> Iterator[None]:
    try:
        yield
    except SystemExit as error:  # it would look like a training that came to its end, or end TRL's event loop
        raise ConfigError(f"the reward {name!r} ended the program (SystemExit: {error}); let it return") from error


def checked(name: str, rewards, count: int) -> list:
    """What a function returned, as a list, which it is if it can be read once only."""
    import torch

    try:
        rewards = list(rewards)
        numbers = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
        wrong = numbers.shape != (count,) or not numbers.isfinite().all()
    except (TypeError, ValueError, OverflowError, RuntimeError):  # what is no list, no number, or beyond all floats
        wrong = True
    if wrong:
        raise ConfigError(
            f"the reward {name!r} returned {one_line(repr(rewards))}; TRL expects a list of {count} finite numbers, "
            "one a completion, or None to leave one out"
        )
    return rewards


def check_first_rewards(trainer) -> None:
    """Have the trainer raise `ConfigError` where no completion has had a reward yet, of no function, or a reward model
    returns what is not finite. TRL trains on nothing there."""
    import torch

    of_rollout, has_had_one = trainer._calculate_rewards, False

    @functools.wraps(of_rollout)
    def calculate(*args, **kwargs):
        nonlocal has_had_one
        rewards = of_rollout(*args, **kwargs)  # a column a function, of all processes
        for name, function, column in zip(trainer.reward_func_names, trainer.reward_funcs, rewards.T, strict=True):
            if isinstance(function, torch.nn.Module) and not column.isfinite().all():
                raise ConfigError(
                    f"the reward model {name} returned {one_line(column.tolist())}, which are not finite"
                )
        has_had_one = has_had_one or not rewards.isnan().all()
        if not has_had_one:
            names = ", ".join(trainer.reward_func_names)
            raise ConfigError(
                f"no completion of the first rollout has a reward, which trains nothing: {names} returned None for "
                f"all {len(rewards)}; return a number where there is one"
            )
        return rewards

    trainer._calculate_rewards = calculate


def in_words(launch: LaunchArguments, rewards: list) -> str:
    """The names of the rewards, and where they come from."""
    model, names = launch.reward_model_name_or_path, names_of(launch)
    said = [f"reward model {model_source(model)}"] if model else []
    for name, function in zip(names, rewards[len(said) :], strict=True):
        said.append(f"{name} ({inspect.getmodule(function).__file__})")
    return ", ".join(said)
