"""The output folder: whose it is, and the checkpoint in it to go on from."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from rloo_memory.errors import EXIT_USAGE, ConfigError, leave
from rloo_memory.folder_lock import owned

STATE = "trainer_state.json"  # what the trainer writes last into a checkpoint
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
    folder, asked = Path(config.output_dir), str(config.resume_from_checkpoint or False)
    lock.enter_context(owned(folder, patience=1, remedy=f"--output_dir {free_name(folder)}"))
    if asked.lower() == "false":
        refuse_other_output(folder)
        return None, ""
    there = checkpoints(folder)
    checkpoint = next(iter(there), None) if asked.lower() == "true" else Path(asked)
    if checkpoint is None or not (checkpoint / STATE).exists():
        raise ConfigError(
            f"resume_from_checkpoint is {asked!r}, and there is no whole checkpoint; {folder} holds "
            f"{', '.join(path.name for path in there) or 'none'}"
        )
    if checkpoint.resolve().parent != folder.resolve():
        refuse_other_output(folder)
    return str(checkpoint), finished(checkpoint, config)


def refuse_other_output(folder: Path) -> None:
    """Raise `ConfigError` where a checkpoint or a model would be replaced or mixed with others."""
    there = [path.name for path in checkpoints(folder)]
    go_on = "go on with that one, --resume_from_checkpoint true, " if there else ""
    there += [path.name for pattern in MODEL_FILES for path in folder.glob(pattern)]
    if there:
        raise ConfigError(
            f"output_dir {str(folder)!r} holds the output of another training ({', '.join(there[:3])}): write to "
            f"another folder, --output_dir {free_name(folder)}, {go_on}or delete the folder"
        )


def free_name(folder: Path) -> str:
    names = (folder.with_name(f"{folder.resolve().name}-{number}") for number in itertools.count(2))
    return str(next(path for path in names if not path.exists()))


def checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N that are whole, the newest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-[0-9]*/{STATE}")]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def going_on(folder: str) -> str:
    """What to do where a training in that folder was ended."""
    there = checkpoints(Path(folder))
    return f"go on from {there[0].name} with --resume_from_checkpoint true" if there else "train again"


def is_full(error: BaseException | None) -> bool:
    """Whether what failed, or what it failed by, is a write that the disk has no room for."""
    said = ("No space left", "StorageFull", "File too large", "FileTooLarge", "quota exceeded", "unexpected pos")
    while error is not None:
        if any(words in str(error) for words in said):
            return True
        error = error.__cause__ or error.__context__
    return False


def finished(checkpoint: Path, config) -> str:
    """Why nothing is left to train, in a line; nothing if something is."""
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / STATE))
    setting, reached = ("max_steps", state.global_step) if config.max_steps > 0 else ("num_train_epochs", state.epoch)
    limit = getattr(config, setting)
    if reached < limit:
        return ""
    return (
        f"finished: {checkpoint} has reached {setting} {limit:g}; nothing is trained; a higher --{setting} trains on"
    )
