"""The output folder: whose it is, and the checkpoint in it to go on from."""

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import EXIT_USAGE, ConfigError, leave, shown
from rloo_memory.folder_lock import owned

MODEL_FILES = ("model*.safetensors", "adapter_model*", "pytorch_model*")
# What decides which weights a checkpoint holds: with another one it cannot be loaded, or only a part of it
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
ADAPTERS = ("use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "load_in_8bit")
# These may differ from start to start: how long, on which host, what is said
NOT_COMPARED = {
    *ADAPTERS, "max_steps", "num_train_epochs", "host_allocator", "memory_snapshot", "predict_memory", "calibration",
    "anyway", "max_prompt_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Where a training begins: at `checkpoint`, else from nothing. `says` is for the first lines; `finished`, if it is
    not empty, why there is nothing left to train."""

    checkpoint: str | None = None
    says: str = ""
    finished: str = ""


@contextlib.contextmanager
def taken(config) -> Iterator[Start]:
    """Make the output folder, keep other launchers out of it, and find where to begin.

    The first process decides, and all of them hear what it found. Raises `ConfigError` in the first process; the
    others end without a word.
    """
    with contextlib.ExitStack() as lock:
        yield decided_once(config, lambda: decide(config, lock))


def decided_once(config, decide: Callable):
    """What `decide` returns in the first process, in all of them. Its `ConfigError` ends them all."""
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
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make output_dir {config.output_dir!r}: {error.strerror}; name another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to output_dir {config.output_dir!r}; name another folder")
    lock.enter_context(owned(folder, patience=1, remedy=f"--output_dir {free_name(folder)}"))
    asked = config.resume_from_checkpoint
    asked = {"true": True, "false": None, False: None}.get(asked, asked)
    if asked is None:
        refuse_other_output(folder)
        says = f"{folder}/memory.json of an earlier training, which kept no model, is replaced"
        return Start(says=says if (folder / "memory.json").exists() else "")
    if asked is True:
        checkpoint, says = newest_whole(folder, config.save_only_model)
    else:
        checkpoint, says = named(Path(asked), folder, config.save_only_model)
    return Start(str(checkpoint), says, finished(checkpoint, config))


def refuse_other_output(folder: Path, and_record: bool = False) -> None:
    """Raise `ConfigError` where a checkpoint or a model (or memory.json) would be replaced or mixed with others."""
    patterns = (*MODEL_FILES, "memory.json") if and_record else MODEL_FILES
    there = [path.name for path in checkpoints(folder)]
    there += sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if not there:
        return
    go_on = any(not broken(path) for path in checkpoints(folder))
    names = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
    raise ConfigError(
        f"output_dir {str(folder)!r} holds the output of another training ({names}): write to another folder, "
        f"--output_dir {free_name(folder)}, "
        + ("go on with that one, --resume_from_checkpoint true, " if go_on else "")
        + "or delete the folder"
    )


def free_name(folder: Path) -> str:
    number = 2
    while (path := folder.with_name(f"{folder.resolve().name}-{number}")).exists():
        number += 1
    return str(path)


def checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]), reverse=True)


def newest_whole(folder: Path, weights_alone: bool) -> tuple[Path, str]:
    """The newest checkpoint that is whole, and what is said of it and of the newer ones. Raises `ConfigError`."""
    said = []
    for path in checkpoints(folder):
        if not (why := broken(path, weights_alone)):
            return path, "; ".join((str(path), *said))
        said.append(f"{path.name} is not whole, {why}")
    if not said:
        raise ConfigError(f"resume_from_checkpoint is on, and {str(folder)!r} holds no checkpoint-N; leave it out")
    raise ConfigError(f"no checkpoint in {str(folder)!r} is whole: {'; '.join(said)}; delete it and start again")


def named(path: Path, folder: Path, weights_alone: bool) -> tuple[Path, str]:
    """A checkpoint that is asked for by its name. Raises `ConfigError`."""
    others = checkpoints(path.parent)
    if not (path / "trainer_state.json").is_file():
        there = ", ".join(sorted(other.name for other in checkpoints(folder))) or "no checkpoint"
        raise ConfigError(
            f"resume_from_checkpoint {str(path)!r} is no checkpoint, it has no trainer_state.json; "
            f"{folder} holds {there}"
        )
    if why := broken(path, weights_alone):
        whole = [str(other) for other in others if not broken(other, weights_alone)][:1]
        raise ConfigError(
            f"resume_from_checkpoint {str(path)!r} is not whole: {why}; "
            + (f"--resume_from_checkpoint {whole[0]}" if whole else "name another")
        )
    if path.resolve().parent != folder.resolve():
        refuse_other_output(folder, and_record=True)
    newer = [other.name for other in others[: [o.name for o in others].index(path.name)]] if path in others else []
    stays = f"; {', '.join(newer)} is newer and stays until this training saves the same update" if newer else ""
    return path, f"{path}{stays}"


def broken(checkpoint: Path, weights_alone: bool = False) -> str:
    """Why a training cannot go on from the checkpoint, as when the disk was full or the process killed while it was
    written; nothing if it can. `weights_alone`: it was meant to be saved without an optimizer."""
    try:
        state_of(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return "trainer_state.json, which is written last, is missing or cut"
    files = [path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()]
    if cut := next((file for file in files if is_cut(checkpoint / file)), None):
        return f"{cut} is cut"
    if (checkpoint / "latest").exists():  # DeepSpeed's, which has all in one folder
        return ""
    names = {file.parts[0] for file in files}
    of_weights = [name for name in names - {"training_args.bin"} if name.endswith((".safetensors", ".bin"))]
    if not of_weights and not any(name.startswith("pytorch_model_fsdp") for name in names):
        return "it has no weights"
    if not weights_alone and not any(name.startswith("optimizer") for name in names):
        return "it has no optimizer state"
    if not weights_alone and "scheduler.pt" not in names:
        return "scheduler.pt is missing"
    return ""


def state_of(checkpoint: Path) -> dict:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["global_step"] + 0, state["epoch"] or 0  # both there
    return state


def is_cut(path: Path) -> bool:
    """Whether a file of weights or of states ends before its end, as its format says."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt"):
                return False
        except SafetensorError:
            return True
    return path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path)  # as torch.save writes them


def finished(checkpoint: Path, config) -> str:
    """Why nothing is left to train, in a line; nothing if something is."""
    state = state_of(checkpoint)
    updates, epochs = state["global_step"], state["epoch"] or 0
    if config.max_steps > 0:
        setting, limit, reached = "max_steps", config.max_steps, updates
    else:
        setting, limit, reached = "num_train_epochs", config.num_train_epochs, epochs
    if reached < limit:
        return ""
    folder = checkpoint.parent
    model = folder if any(folder.glob("*.safetensors")) else checkpoint
    return (
        f"finished: {checkpoint} has {updates} updates ({epochs:.4g} epochs), and {setting} is {limit:.10g}; "
        f"nothing is trained. The model is in {model}; a higher --{setting} trains on"
    )


def compare(checkpoint: str, settings: dict, shape: dict) -> str:
    """What is said where the training that left the checkpoint had other settings; nothing if it had the same, or left
    no memory.json. `shape`: the model's configuration. Raises `ConfigError` for another model or other adapters."""
    try:
        record = json.loads((Path(checkpoint).parent / "memory.json").read_text())
        before, shape_before = record["settings"], record["model_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    settings = json.loads(json.dumps(settings, default=str))

    def differing(names, old, new) -> list[str]:
        both = [(name, old.get(name), new.get(name)) for name in names]
        return [f"{name} is {shown(is_now)} and was {shown(was)}" for name, was, is_now in both if was != is_now]

    def text(config):  # of a model with images, the part that reads text
        return config | (config.get("text_config") or {})

    if wrong := differing(ADAPTERS, before, settings) + differing(SHAPE, text(shape_before), text(shape)):
        raise ConfigError(
            f"{checkpoint} is of another training: {'; '.join(wrong)}; go on with the settings it had, or begin anew "
            "in another --output_dir"
        )
    return "; ".join(differing(sorted((before.keys() | settings.keys()) - NOT_COMPARED), before, settings))
