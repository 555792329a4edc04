"""The output folder: whose it is, and the checkpoint in it to go on from."""

import contextlib
import itertools
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rloo_memory.errors import EXIT_USAGE, ConfigError, causes, leave
from rloo_memory.launch import checkpoints
from rloo_memory.storage import owned

MODEL_FILES = ("model*.safetensors", "adapter_model*", "pytorch_model*")


@contextlib.contextmanager
def taken(config) -> Iterator[tuple[str | None, str]]:
    """Make the output folder and keep other launchers out of it. The checkpoint to go on from, None for none, and why
    nothing is left to train, if so."""
    with contextlib.ExitStack() as lock:
        yield decided_once(config, lambda: decide(config, lock))


def decided_once(config, decide: Callable):
    """What `decide` returns in the first process, in all of them. Its `ConfigError` ends them all: the others without
    a word."""
    found = [None]
    if config.process_index == 0:
        try:
            found = [decide()]
        except ConfigError as error:
            found = [error]
    if config.world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(found)
    if isinstance(found[0], ConfigError):
        end_together()
        if config.process_index > 0:
            leave(EXIT_USAGE)
        raise found[0]
    return found[0]


def end_together() -> None:
    """gloo aborts a process that the others have left."""
    from accelerate import PartialState

    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def decide(config, lock: contextlib.ExitStack) -> tuple[str | None, str]:
    if not config.output_dir:
        raise ConfigError("output_dir is empty: name a folder, or . for this one")
    folder, asked = Path(config.output_dir), str(config.resume_from_checkpoint or False)
    lock.enter_context(owned(folder, patience=1, remedy=f"--output_dir {free_name(folder)}"))
    if asked.lower() == "false":
        refuse_other_output(folder)
        return None, ""
    checkpoint, state = newest_whole(folder, config) if asked.lower() == "true" else named(asked, folder, config)
    if not (checkpoint / "optimizer.pt").exists() and config.save_only_model:
        print(f"begins  with new moments and a new schedule: save_only_model, and {checkpoint} has no optimizer.pt")
    if checkpoint.parent.resolve() != folder.resolve():  # it may be a link to another disk
        refuse_other_output(folder)
    return str(checkpoint), finished(checkpoint, state, config)


def named(asked: str, folder: Path, config) -> tuple:
    """The checkpoint that is asked for, and its state. Raises `ConfigError` where it is not whole."""
    try:
        return Path(asked), checkpoints.whole(Path(asked), config)
    except ConfigError as problem:
        there = ", ".join(path.name for path in checkpoints.of_folder(folder)) or "none"
        raise ConfigError(
            f"resume_from_checkpoint {asked!r}: {problem}; name another: {folder} holds {there}"
        ) from problem


def newest_whole(folder: Path, config) -> tuple:
    """The checkpoint that `resume_from_checkpoint: true` means, and its state; which newer ones it passes over is
    said. Raises `ConfigError` where none is whole."""
    passed = []
    for checkpoint in checkpoints.of_folder(folder):
        try:
            state = checkpoints.whole(checkpoint, config)
            if checkpoint.name != (name := f"checkpoint-{state.global_step}"):
                raise ConfigError(f"it is a {name} under another name")
        except ConfigError as problem:
            passed.append(f"{checkpoint}: {problem}")
            continue
        print("".join(f"begins  not from {line}\n" for line in passed), end="")
        return checkpoint, state
    raise ConfigError(
        f"resume_from_checkpoint is true, and {folder} has no whole checkpoint ({'; '.join(passed) or 'none'}); train "
        f"from the start, without it and with --output_dir {free_name(folder)}"
    )


def refuse_other_output(folder: Path) -> None:
    """Raise `ConfigError` where a checkpoint or a model would be replaced or mixed with others."""
    there = [path.name for path in checkpoints.of_folder(folder) if (path / checkpoints.STATE).exists()]
    go_on = "go on with that one, --resume_from_checkpoint true, " if there else ""
    there += [path.name for pattern in MODEL_FILES for path in folder.glob(pattern)]
    if there:
        raise ConfigError(
            f"output_dir {str(folder)!r} holds the output of another training ({', '.join(there[:3])}): write to "
            f"another folder, --output_dir {free_name(folder)}, {go_on}or delete the folder"
        )


def free_name(folder: Path) -> str:
    """Of a folder that is not there yet, beside this one if that can be; as a shell takes it."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent):  # root may write to /proc, and yet not
            beside = folder
    except OSError:
        beside = Path(folder.name)
    named = beside if beside.name.strip(".") else beside.resolve()
    return shlex.quote(next(n for i in itertools.count(2) if not os.path.exists(n := f"{named}-{i}")))


def going_on(config) -> str:
    """What to do where a training was ended, maybe while it wrote its newest checkpoint."""
    try:
        with contextlib.redirect_stdout(None):
            checkpoint, _ = newest_whole(Path(config.output_dir), config)
    except ConfigError:
        return "train again"
    return f"go on from {checkpoint.name} with --resume_from_checkpoint true"


def is_full(error: BaseException) -> bool:
    """Whether what failed, or what it failed by, is a write that the disk has no room for."""
    said = ("No space left", "StorageFull", "File too large", "FileTooLarge", "quota exceeded", "unexpected pos")
    return any(words in str(cause) for cause in causes(error) for words in said)


def finished(checkpoint: Path, state, config) -> str:
    """Why nothing is left to train, in a line; nothing if something is."""
    setting, reached = ("max_steps", state.global_step) if config.max_steps > 0 else ("num_train_epochs", state.epoch)
    limit = getattr(config, setting)
    if reached < limit:
        return ""
    return (
        f"finished: {checkpoint} has reached {setting} {limit:g}; nothing is trained; a higher --{setting} trains on"
    )
