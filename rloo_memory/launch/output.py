"""The output folder: whose it is, and the checkpoint in it to go on from."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import EXIT_USAGE, ConfigError, leave
from rloo_memory.folder_lock import owned
from rloo_memory.storage import read_json

MODEL_FILES = ("model*.safetensors", "adapter_model*", "pytorch_model*")


@dataclass(frozen=True)
class Start:
    """Where a training begins: at `checkpoint`, else from nothing; what is said of it, and why nothing is left to
    train, if so."""

    checkpoint: str | None = None
    says: str = ""
    finished: str = ""


@contextlib.contextmanager
def taken(config) -> Iterator[Start]:
    """Make the output folder, keep other launchers out of it, and find where to begin."""
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


def decide(config, lock: contextlib.ExitStack) -> Start:
    folder, asked = Path(config.output_dir), str(config.resume_from_checkpoint or False)
    lock.enter_context(owned(folder, patience=1, remedy=f"--output_dir {free_name(folder)}"))
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to output_dir {config.output_dir!r}; name another folder")
    if asked.lower() == "false":
        refuse_other_output(folder)
        says = f"{folder}/memory.json of an earlier training, which kept no model, is replaced"
        return Start(says=says if (folder / "memory.json").exists() else "")
    checkpoint, says = newest_whole(folder) if asked.lower() == "true" else (Path(asked), asked)
    if not state_of(checkpoint):
        raise ConfigError(
            f"resume_from_checkpoint {asked!r} is no checkpoint, it has no whole trainer_state.json; {folder} holds "
            f"{', '.join(path.name for path in checkpoints(folder)) or 'none'}"
        )
    if checkpoint.resolve().parent != folder.resolve():
        refuse_other_output(folder, and_record=True)
    return Start(str(checkpoint), f"from {says}", finished(checkpoint, config))


def refuse_other_output(folder: Path, and_record: bool = False) -> None:
    """Raise `ConfigError` where a checkpoint or a model (or memory.json) would be replaced or mixed with others."""
    patterns = (*MODEL_FILES, "memory.json") if and_record else MODEL_FILES
    there = [path.name for path in checkpoints(folder)]
    there += sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if not there:
        return
    go_on = any(state_of(path) for path in checkpoints(folder))
    names = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
    raise ConfigError(
        f"output_dir {str(folder)!r} holds the output of another training ({names}): write to another folder, "
        f"--output_dir {free_name(folder)}, "
        + ("go on with that one, --resume_from_checkpoint true, " if go_on else "")
        + "or delete the folder"
    )


def free_name(folder: Path) -> str:
    names = (folder.with_name(f"{folder.resolve().name}-{number}") for number in itertools.count(2))
    return str(next(path for path in names if not path.exists()))


def checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]), reverse=True)


def state_of(checkpoint: Path) -> dict | None:
    """What the trainer writes last into a checkpoint: None where it came to no end, as when the process was killed."""
    state = read_json(checkpoint / "trainer_state.json")
    return state if isinstance(state, dict) and "global_step" in state else None


def newest_whole(folder: Path) -> tuple[Path, str]:
    """The newest checkpoint that is whole, and what is said of it and of the newer ones. Raises `ConfigError`."""
    found = checkpoints(folder)
    whole = next((path for path in found if state_of(path)), None)
    if whole is None:
        raise ConfigError(
            f"resume_from_checkpoint is on, and {str(folder)!r} holds no checkpoint-N with a whole "
            "trainer_state.json, which is written last; leave it out"
        )
    return whole, "; ".join([str(whole), *(f"{path.name} is not whole" for path in found[: found.index(whole)])])


def finished(checkpoint: Path, config) -> str:
    """Why nothing is left to train, in a line; nothing if something is."""
    state = state_of(checkpoint)
    updates, epochs = state["global_step"], state["epoch"] or 0
    setting, reached = ("max_steps", updates) if config.max_steps > 0 else ("num_train_epochs", epochs)
    limit = getattr(config, setting)
    if reached < limit:
        return ""
    return (
        f"finished: {checkpoint} has {updates} updates ({epochs:.4g} epochs), and {setting} is {limit:g}; nothing is "
        f"trained; a higher --{setting} trains on"
    )
