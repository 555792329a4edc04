"""The checkpoints of a training, and whether one is whole: has all that a training which goes on from it reads."""

import json
import os
import re
import zipfile
from pathlib import Path

from rloo_memory.errors import ConfigError

STATE = "trainer_state.json"  # what the trainer writes last into a checkpoint
WEIGHTS = ("model.safetensors*", "adapter_model.*", "*/adapter_model.*", "pytorch_model.bin*")
READ = re.compile(
    r"(adapter_|config\.json|model|optimizer|pytorch_model|rng_state|scaler|scheduler).*|.*_states\.pt|\.metadata"
)


def of_folder(folder: Path) -> list[Path]:
    """The folders checkpoint-N, the newest first."""
    found = [path for path in folder.glob("checkpoint-*/") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def whole(checkpoint: Path, config):
    """The trainer's state in a checkpoint. Raises `ConfigError` with what is missing or damaged of all that `Trainer`
    reads with these settings."""
    from transformers import TrainerState

    if not checkpoint.is_dir():
        raise ConfigError("there is no such folder")
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except FileNotFoundError as error:
        raise ConfigError(f"{STATE} is missing") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{STATE} is damaged") from error
    if not state.global_step:
        raise ConfigError(f"{STATE} has no global_step")
    weights, *states = needed(config)
    if not is_there(checkpoint, weights):
        raise ConfigError(f"none of {', '.join(weights)} is there")
    for names in states:
        if not config.save_only_model and not is_there(checkpoint, names):
            raise ConfigError(
                f"{' or '.join(names)} is missing (--save_only_model true goes on with the weights alone)"
            )
    for path in sorted(checkpoint.rglob("*")):
        if READ.fullmatch(path.name) and (problem := damage(path)):
            raise ConfigError(f"{path.relative_to(checkpoint)} {problem}")
    return state


def needed(config) -> list[tuple[str, ...]]:
    """Names of files, one of each has to be there: first those of the weights, then those of how they are trained."""
    drawn = ("rng_state*.pth",)
    if config.deepspeed_plugin:
        return [("latest",), drawn]
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" or config.fsdp:
        return [
            ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata"),
            ("optimizer.bin", "optimizer_0/.metadata"),
            ("scheduler.pt",),
            drawn,
        ]
    return [WEIGHTS, ("optimizer.pt",), ("scheduler.pt",), drawn]


def is_there(checkpoint: Path, names: tuple[str, ...]) -> bool:
    return any(path for name in names for path in checkpoint.glob(name))


def damage(path: Path) -> str:
    """What is wrong with a file of a checkpoint, by the lengths that its format says. Reads no tensors."""
    from safetensors import safe_open
    from torch.distributed.checkpoint import FileSystemReader

    try:
        if path.name.startswith("adapter_model.") and not path.with_name("adapter_config.json").exists():
            return "has no adapter_config.json"
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return ""
        ends = {}  # of what lies in other files
        if path.name == ".metadata":  # of FSDP's shards
            for part in FileSystemReader(path.parent).read_metadata().storage_data.values():
                ends[part.relative_path] = max(part.offset + part.length, ends.get(part.relative_path, 0))
        elif path.suffix == ".json":
            ends = dict.fromkeys(json.loads(path.read_text()).get("weight_map", {}).values(), 0)
        elif path.suffix in (".pt", ".pth", ".bin") and path.is_file() and not zipfile.is_zipfile(path):
            return "is damaged"
        parts = {path.with_name(name): end for name, end in ends.items()}
        cut = (part for part, end in parts.items() if not part.exists() or part.stat().st_size < end)
        return next((f"names {part.name}, which is not whole" for part in cut), "")
    except Exception:  # each format fails in its own way
        return "is damaged"
