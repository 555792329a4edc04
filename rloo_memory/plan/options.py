"""The command line's description of a training, for the planner and the doctor."""

import argparse
import contextlib
import io
import logging
import os
import re
import sys
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError, read_by_nobody
from rloo_memory.models import is_model, named_config
from rloo_memory.plan.accuracy.calibration import Calibration, load
from rloo_memory.plan.accuracy.cards import size_as_sold
from rloo_memory.plan.accuracy.reserve import FIXED, LIBRARIES, OUTSIDE, Room
from rloo_memory.plan.ranges import AT_LEAST_1
from rloo_memory.plan.records import Run
from rloo_memory.plan.setups import OPTIONS, SAME_NAME, Setup, check, wrong_numbers
from rloo_memory.plan.trl_settings import WEIGHT_BITS, changes, from_settings, with_changes
from rloo_memory.settings.profiles import devices_from
from rloo_memory.sizes import GIB, parse_bytes, size_hint

LEAST_DEVICE = 2**28  # bytes: less is a forgotten unit
# Settings of a training that no formula knows
UNPLANNED = ("deepspeed", "fsdp", "parallelism_config", "torch_compile", "tp_plan")


class WhileRead(io.TextIOBase):
    """Standard output that may lose its reader, such as `head`: the command goes on, and writes its files."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            read_by_nobody(self.stream)


@contextlib.contextmanager
def quiet():
    """Warnings, log lines and progress bars of libraries stay away from what the user asked for."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(WhileRead(sys.stdout)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def parser_of(command: str, description: str, device_memory: str) -> argparse.ArgumentParser:
    """With the options that `asked` reads: those that stand for several fields of `Setup`, those of one, and those of
    the device. `device_memory` says what it is without the option of that name."""
    parser = argparse.ArgumentParser(
        prog=f"rloo-memory {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a built-in shape (Qwen/Qwen3-8B), a local folder, or hub:owner/name")
    parser.add_argument(
        "--profile", help="a name in rloo_memory/settings/profiles or a YAML file; options override it"
    )
    parser.add_argument("--prompts", type=int, help="prompts a generation batch; default 1, or as the profile says")
    parser.add_argument("--accelerate", type=Path, help="accelerate's config: processes, DDP or FSDP2, offloading")
    parser.add_argument(
        "--calibration", type=Path, metavar="RUN_DIR", help="correct by what this run of the launcher measured"
    )
    for declared in fields(Setup):
        if declared.name in OPTIONS:
            kind = {int: int, int | None: int, float: float}.get(declared.type, str)
            how = dict(action="store_const", const=not declared.default) if declared.type is bool else dict(type=kind)
            how |= dict(dest=declared.name, help=declared.metadata["about"], **declared.metadata["keywords"])
            parser.add_argument(OPTIONS[declared.name], **how)
    parser.add_argument("--device-memory", help=f"that PyTorch sees, such as 23.5GiB of an RTX 4090{device_memory}")
    parser.add_argument(
        "--reserve",
        help="of it for CUDA's context, cuBLAS and what the allocator cannot use; default: "
        f"{OUTSIDE / GIB:.2f} GiB and {FIXED} of what comes and goes (measured by others on GPUs)",
    )
    return parser


def room_of(device_memory: str | int | None, reserve: str | None, device: str = "cuda") -> Room | None:
    """What a device of that memory has for tensors; None where none is named. Raises `ConfigError` for sizes that no
    device has."""
    if device_memory is None:
        return None
    size, fragments = read_bytes("--device-memory", device_memory), 0.0
    if reserve is not None:
        kept, taken = read_bytes("--reserve", reserve), f"--reserve {reserve}"
    elif device == "cpu":
        kept, taken = LIBRARIES, f"{LIBRARIES / GIB:.1f} GiB for Python and its libraries"
    else:
        kept, fragments = OUTSIDE, FIXED
        taken = f"{kept / GIB:.2f} GiB for CUDA's context and cuBLAS, {FIXED} of what comes and goes for the allocator"
    if size < LEAST_DEVICE:
        hint = size_hint(str(device_memory))
        raise ConfigError(f"--device-memory {device_memory} is {size:,} bytes, below the 256 MiB of any device{hint}")
    if kept >= size:
        raise ConfigError(f"--device-memory {device_memory} less {taken} leaves nothing; --reserve 100MiB takes less")
    return Room(size - kept, fragments, size, taken)


def read_bytes(option: str, text: str | int) -> int:
    """Bytes that an option asks for. Raises `ConfigError` that names it."""
    try:
        return text if isinstance(text, int) else parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def model_config(model: str):
    """The transformers config that a model's name stands for. Raises `ConfigError`, also for a config with values of a
    wrong kind."""
    if not isinstance(model, str):
        raise ConfigError(f"model_name_or_path is {model!r}; it must be a name")
    if model.startswith(("./", "../", "/", "~")) and not Path(model).exists():
        raise ConfigError(f"no folder {model}: name one with a config.json, a built-in shape, or hub:owner/name")
    hf_config = named_config(model)
    for name in ("num_hidden_layers", "vocab_size", "hidden_size"):
        value = getattr(hf_config.get_text_config(), name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            has = "no" if value is None else f"{str(value)[:40]!r} as"
            raise ConfigError(f"the config of {model!r} has {has} {name}; the planner needs a whole number there")
    return hf_config


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where a file cannot be written, before the work is done that it is to hold."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}; name a file in a folder that is there")


def read_image(text: str) -> tuple[int, int]:
    """Width and height in pixels. Raises `ConfigError`."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not found:
        raise ConfigError(f"--image {text[:40]!r}: write width x height in pixels, like 1280x720")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Asked:
    """What is asked of the planner: the name of a model and its config, settings under TRL's names, what they come to,
    and where it is to fit: `room` is None without a device's memory."""

    model: str | None
    hf_config: object
    settings: dict
    setup: Setup
    room: Room | None
    calibration: Calibration | None


def asked(args: argparse.Namespace, profile: dict | None, run: Run | None = None) -> Asked:
    """What the options ask for, over the settings of a profile or of a run. Raises `ConfigError`."""
    base, where, memory = profile, {}, args.device_memory
    if run:
        base, where = run.settings | {"max_prompt_tokens": run.prompt_tokens}, run.where
        memory = run.device_bytes if memory is None else memory
    model = args.model or (base or {}).get("model_name_or_path")
    if run is None and model is None:
        raise ConfigError("no model: name one with --model, or a profile that has model_name_or_path")
    hf_config = run.hf_config if run else model_config(model)
    on_cpu = "cpu" if (base or {}).get("use_cpu") else "cuda"
    device = args.device or where.get("device", on_cpu)
    settings, setup, called = setup_from(args, base, hf_config, **where | {"device": device})
    device = setup.device  # accelerate's file may say another
    room = room_of(memory, args.reserve, device)
    setup = replace(setup, device_memory=room.device if room else 0)
    check(setup, hf_config, called)
    calibration = load(args.calibration, device) if args.calibration else None
    if device == "cuda" and (hint := size_as_sold(str(args.device_memory))):
        print(hint, file=sys.stderr)
    return Asked(model, hf_config, settings, setup, room, calibration)


def setup_from(
    args: argparse.Namespace, profile: dict | None, hf_config=None, **where
) -> tuple[dict, Setup, dict[str, str]]:
    """(settings, what they ask for, what the user wrote for a field of `Setup`): those of the profile or, with None,
    the usual ones of `Setup`, under the options. `where` are fields of `Setup` that are no settings. Raises
    `ConfigError`."""
    usual = {declared.name: declared.default for declared in fields(Setup) if declared.metadata.get("written")}
    base = dict(usual if profile is None else profile)
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    called = {"prompt_tokens": "max_prompt_tokens"} | {name: OPTIONS[name] for name in options}
    prompt = options.get("prompt_tokens", base.get("max_prompt_tokens"))
    if prompt is None:
        raise ConfigError("no prompt length: --prompt N, the tokens of the longest prompt")
    wrong, loaded = wrong_numbers(options | {"prompt_tokens": prompt}, called), base.get("model_init_kwargs")
    if problem := AT_LEAST_1.wrong("--prompts", args.prompts):
        wrong.append(problem)
    if found := [name for name in UNPLANNED if base.get(name) or isinstance(loaded, dict) and loaded.get(name)]:
        wrong.append(f"no formula for {', '.join(found)}: leave it out; devices are read from --accelerate FILE")
    if wrong:
        raise ConfigError("; ".join(wrong))
    if args.accelerate:
        where |= devices_from(args.accelerate, autocast=base.get("bf16") is not False or bool(base.get("fp16")))
    if args.images:
        where["images"] = tuple(map(read_image, args.images))

    before = from_settings(prompt, base, **where)
    if args.reward_model:
        where["reward_model"] = args.reward_model
        if args.reward_model != "policy":
            model_config(args.reward_model)
    settings = with_options(args, options, base, before, profile is not None)
    return settings, from_settings(prompt, settings, hf_config, **where), called


def with_options(args: argparse.Namespace, options: dict, base: dict, before: Setup, of_profile: bool) -> dict:
    """The settings `base`, which come to the setup `before`, with what the options ask for."""
    settings = with_changes(base, batches(args, before, of_profile))
    settings |= {name: value for name, value in options.items() if name in SAME_NAME}
    if args.model:  # the first line of a file of settings, whatever the order of the profile
        settings = {"model_name_or_path": args.model} | settings | {"model_name_or_path": args.model}
    if args.lora_rank:
        first = {} if base.get("use_peft") else {"lora_target_modules": "all-linear", "lora_dropout": 0.0}
        settings |= {"use_peft": True, "lora_r": args.lora_rank, **first}
    elif args.lora_rank == 0:
        settings["use_peft"] = False
    if not of_profile:
        settings.setdefault("dtype", "bfloat16" if args.lora_rank else "float32")
        half = settings["dtype"] == "float16"  # of a GPU without bfloat16
        settings |= {"bf16": False, "fp16": True} if half else {}
    # A shape or the policy's is planned with, and nothing to load
    if args.reward_model and is_model(args.reward_model):
        settings["reward_model_name_or_path"] = args.reward_model
    if args.weight_bits not in (None, before.weight_bits):
        settings = with_changes(settings, WEIGHT_BITS[args.weight_bits])
    return settings | settings_of_adapter(settings.get("model_name_or_path"), base, args.lora_rank)


def settings_of_adapter(model: str | None, settings: dict, rank: int | None = None) -> dict:
    """What an adapter's folder decides, where `model` is one; dropout is as `settings` have it, if they do. Raises
    `ConfigError` where another `rank` is asked for."""
    adapter = adapter_of(model)
    if adapter is None:
        return {}
    if rank not in (None, adapter.settings["lora_r"]):
        raise ConfigError(
            f"--lora {rank}: {model} is an adapter of rank {adapter.settings['lora_r']}, which is trained further; "
            "leave out --lora"
        )
    return adapter.settings_over(settings)


def batches(args: argparse.Namespace, before: Setup, of_profile: bool) -> dict:
    """The settings that --k and --prompts decide: completions a prompt, and rows. --k keeps a profile's prompts."""
    if args.num_generations is None and args.prompts is None:
        return {}
    if args.prompts is None and of_profile and before.generation_rows % before.num_generations == 0:
        return changes(before, before.with_k(args.num_generations))
    k = args.num_generations or before.num_generations
    return {
        "num_generations": k,
        "per_device_train_batch_size": k * (args.prompts or 1),
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "generation_batch_size": None,
    }
