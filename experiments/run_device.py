"""Pick a device, hold a run to its memory budget there, and measure what it uses. Sizes in bytes.

Starts fast: torch is imported only where it is asked.
"""

import ctypes
import os
import resource
import sys
import warnings
from argparse import Namespace
from pathlib import Path

from experiments.config import ROOT, RunConfig
from rloo_memory.device import cpu_name, level, machine_name, show_one_gpu, status_bytes
from rloo_memory.errors import ConfigError, choose, shown

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # in glibc's malloc.h: torch's wheels for Linux need glibc


def pick_device(wanted: str) -> tuple[str, str]:
    """("cpu" or "cuda", name). Raises `ConfigError` for a device that is not there. Of several GPUs only the first
    stays visible, as in the launcher."""
    choose("device", wanted, ("auto", "cpu", "cuda"))
    if wanted == "cpu":
        return "cpu", cpu_name()
    show_one_gpu()
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return "cuda", torch.cuda.get_device_properties(0).name
    if wanted == "cuda":
        why = "".join(f" ({str(warning.message).splitlines()[0]})" for warning in said[:1])
        raise ConfigError(
            f"device {wanted!r} is not usable here{why}; use --device cpu, or check nvidia-smi and torch"
        )
    from rloo_memory.cuda_check import unused_gpu

    if why := unused_gpu():
        print(f"device  the CPU: {why}", file=sys.stderr)
    return "cpu", cpu_name()


def machine_folder(args: Namespace, kind: str, name: str) -> Path:
    """results/<machine> by --results and --machine, absolute; by default this clone's, named as the device. Raises
    `ConfigError` where --machine is more than the name of a folder."""
    machine = machine_name(kind, name) if args.machine is None else args.machine
    if machine in ("", ".", "..") or "/" in machine:
        raise ConfigError(f"--machine {shown(machine)} is not one plain folder name; write it like nvidia-h200")
    return (args.results or ROOT / "results").absolute() / machine


def cuda_uuid() -> str:
    """NVML and CUDA number devices differently; the UUID means the same device to both. Of a MIG instance it is what
    `CUDA_VISIBLE_DEVICES` says: torch may give that of the whole GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if visible.startswith("MIG-"):
        return visible
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def outside_pool(device_kind: str) -> int:
    """Bytes that the device holds besides torch's pool; 0 on a CPU."""
    if device_kind != "cuda":
        return 0
    import torch

    return level("cuda") - torch.cuda.memory_reserved()


def enforce_budget(config: RunConfig) -> None:
    """From here on torch can allocate at most the budget, so that "out of memory" is an outcome and not an accident.

    CUDA: the fraction of the device that this process may reserve. CPU: a limit on the process's data, counted from
    what the interpreter and its libraries already hold.
    """
    if config.device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if config.budget_bytes < total:
            torch.cuda.set_per_process_memory_fraction(config.budget_bytes / total)
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + config.budget_bytes, hard))


def lift_budget() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def read_weights(trainer) -> None:
    """Make the weights of its models resident. On the CPU transformers maps a checkpoint's file, and its pages come
    when they are first read: with prefix sharing in front of the first step, else within it."""
    from torch.nn import Module

    for model in {value for value in vars(trainer).values() if isinstance(value, Module)}:  # one may have two names
        for weights in model.parameters():
            weights.detach().sum()


def keep_only_live_memory() -> None:
    """Make glibc return every freed block of 128 KiB or more to the system at once.

    By default it raises that size up to 32 MiB as the program runs and keeps freed blocks below it, so that resident
    memory would show the heap's fragmentation instead of the tensors that are alive. A page fault for each page of
    each tensor takes its time: not where seconds count.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)  # where glibc begins


def keep_freed_memory() -> None:
    """Make glibc keep every freed block, for times: as with PyTorch's allocator on CUDA, nothing pays the system for
    the same pages twice. By default it gives blocks above 32 MiB back at once, and the way with the larger tensors
    takes longer: up to 1.5 times for whole rows of 3,100 tokens."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**30)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, -1)  # trims never
