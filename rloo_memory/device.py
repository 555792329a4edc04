"""The device and the host: their names, their memory in use and free, and errors that say that it ran out. Bytes."""

import ctypes
import gc
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from rloo_memory.errors import causes

OOM_TEXTS = (
    "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memory allocation of",
    "can't start new thread",
    # CUDA's libraries take their memory themselves. One that cannot be begun has in practice no room for its handle
    "_status_alloc_failed", "_allocation_failed", "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_not_initialized",
)  # fmt: skip


def show_one_gpu() -> str:
    """Of several GPUs leave only the first visible to this process: TRL would put a model's layers on all of them, and
    one would wait for another. Returns what to say of it. To be called before torch looks at the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible.split(",") if visible else []
    if visible is None:
        from rloo_memory import nvml

        with suppress(nvml.pynvml.NVMLError):
            shown = nvml.visible_devices(nvml.nvml_devices(), None)
    if len(shown) < 2:
        return ""
    first = os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0] if visible else "0"
    return (
        f"{len(shown)} GPUs are visible, and one process trains on one: CUDA_VISIBLE_DEVICES={first}. Set it to "
        "choose another; for all of them: accelerate launch (docs/launch.md)"
    )


def level(device_kind: str) -> int:
    """Memory in use now, in the device's main measure: device-wide used on CUDA, resident on the CPU. Bytes."""
    if device_kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    return status_bytes("VmRSS")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, here or in what led to this error: CUDA's own error, Python's, or the text of
    torch's CPU allocator or of CUDA's libraries."""
    return any(
        isinstance(cause, MemoryError)
        or type(cause).__name__ == "OutOfMemoryError"
        or (isinstance(cause, RuntimeError | OSError) and tells_of_memory(str(cause)))
        for cause in causes(error)
    )


def tells_of_memory(text: str) -> bool:
    """Whether an error's text, or the last words of a process that native code aborted, say that memory ran out."""
    return any(sign in text.lower() for sign in OOM_TEXTS)


def status_bytes(field: str) -> int:
    """A size from /proc/self/status in bytes, such as VmRSS, VmHWM or VmData. Raises OSError without a /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def available_bytes(device: str) -> int:
    """What is free on the device ("cpu", "cpu:0": in the host's memory, and in the cgroup that this process is in)."""
    if not device.startswith("cpu"):  # a process of several on a CPU has a number, too
        import torch

        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        file_pages = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used = int((group / "memory.current").read_text()) - int(file_pages[1])
    except (OSError, TypeError):  # no cgroup of version 2
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def settle() -> None:
    """Give freed host memory back to the system, so that a level read now is what is in use."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)  # not every malloc has it


def machine_name(device_kind: str, device_name: str) -> str:
    """Folder name under results/: the GPU's name, or the processor's with its core count."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|@.*|\bcpu\b", " ", device_name.lower())).strip("-")
    return slug if device_kind == "cuda" else f"cpu-{slug}-{os.cpu_count()}-cores"


def cpu_name() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    named = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1].strip() if named else platform.machine()
