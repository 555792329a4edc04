"""Pick a device, hold a run to its memory budget there, and measure what it uses. Sizes in bytes.

    python -m experiments.device [--device auto]

prints the name of this machine's folder below results/. Starts fast: torch is imported only where it is asked.
"""

import ctypes
import gc
import os
import re
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments import config as cfg
from experiments.config import ConfigError, RunConfig
from experiments.run_options import Parser

OOM_TEXTS = (
    "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memory allocation of",
    "can't start new thread",
    # CUDA's libraries take their memory themselves. One that cannot be begun has in practice no room for its handle
    "_status_alloc_failed", "_allocation_failed", "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_not_initialized",
)  # fmt: skip


def pick_device(wanted: str) -> tuple[str, str, int]:
    """("cpu" or "cuda", name, total bytes). Raises `ConfigError` for a device that is not there.

    Of several GPUs only the chosen one stays visible: with more, the trainers would spread over all of them.
    """
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind, _, index = wanted.partition(":")
    cfg.choose("device", kind, ("auto", "cpu", "cuda"))
    if kind == "cpu":
        return "cpu", cfg.cpu_name(), host_bytes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible not in ("", "-1"):
        entries = visible.split(",") if visible else None
        if not (index or "0").isdigit() or (entries and int(index or 0) >= len(entries)):
            shown = f"CUDA_VISIBLE_DEVICES={visible} shows {len(entries)}" if entries else "write it like cuda:0"
            raise ConfigError(f"device {wanted!r} does not exist; {shown}")
        os.environ["CUDA_VISIBLE_DEVICES"] = entries[int(index or 0)] if entries else index or "0"
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        properties = torch.cuda.get_device_properties(0)
        return "cuda", properties.name, properties.total_memory
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    if kind == "cuda":
        why = "".join(f" ({str(warning.message).splitlines()[0]})" for warning in said[:1])
        raise ConfigError(
            f"device {wanted!r} is not usable here{why}; use --device cpu, or check nvidia-smi and torch"
        )
    from experiments.cuda_check import unused_gpu

    if why := unused_gpu():
        print(f"device  the CPU: {why}", file=sys.stderr)
    return "cpu", cfg.cpu_name(), host_bytes


def show_one_gpu() -> str:
    """Of several GPUs leave only the first visible to this process: with more, TRL's trainers would spread over all of
    them, which is refused. Returns what to say of it. To be called before torch looks at the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible.split(",") if visible else []
    if visible is None:
        from experiments import memory_monitor

        with suppress(memory_monitor.pynvml.NVMLError):
            shown = memory_monitor.visible_devices(memory_monitor.nvml_devices(), None)
    if len(shown) < 2:
        return ""
    first = os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0] if visible else "0"
    return (
        f"{len(shown)} GPUs are visible, and one process trains on one: CUDA_VISIBLE_DEVICES={first}. Set it to "
        "choose another; for all of them: accelerate launch (docs/launch.md)"
    )


def device_name(kind: str, device=None) -> str:
    """Of a "cuda" device, the current one if none is named, or of the processor."""
    if kind != "cuda":
        return cfg.cpu_name()
    import torch

    return torch.cuda.get_device_name(device)


def cuda_uuid() -> str:
    """NVML and CUDA number devices differently; the UUID means the same device to both. Of a MIG instance it is what
    `CUDA_VISIBLE_DEVICES` says: torch may give that of the whole GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if visible.startswith("MIG-"):
        return visible
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


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
    seen: list[BaseException] = []  # a chain can be a ring
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, RuntimeError | OSError) and tells_of_memory(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


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
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc


def keep_only_live_memory() -> None:
    """Make glibc return every freed block of 128 KiB or more to the system at once.

    By default it raises that size up to 32 MiB as the program runs and keeps freed blocks below it, so that resident
    memory would show the heap's fragmentation instead of the tensors that are alive. A page fault for each page of
    each tensor takes its time: not where seconds count.
    """
    mallopt(mmap_threshold=2**17)  # where glibc begins


def keep_freed_memory() -> None:
    """Make glibc keep every freed block, for times: as with PyTorch's allocator on CUDA, nothing pays the system for
    the same pages twice. By default it gives blocks above 32 MiB back at once, and the way with the larger tensors
    takes longer: up to 1.5 times for whole rows of 3,100 tokens."""
    mallopt(mmap_threshold=2**30, trim_threshold=-1)  # -1 trims never


@contextmanager
def only_live_memory() -> Iterator[None]:
    """`keep_only_live_memory` for a while. Then freed blocks are kept up to 32 MiB, where glibc's own raising ends."""
    keep_only_live_memory()
    try:
        yield
    finally:
        mallopt(mmap_threshold=2**25, trim_threshold=2**26)


def mallopt(mmap_threshold: int, trim_threshold: int | None = None) -> None:
    """Sizes in bytes; nothing where malloc is not glibc's."""
    try:
        function = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    function(-3, mmap_threshold)  # M_MMAP_THRESHOLD in malloc.h
    if trim_threshold is not None:
        function(-1, trim_threshold)  # M_TRIM_THRESHOLD


def main(argv: list[str] | None = None) -> int:
    return cfg.exit_code("device", print_machine, argv)


def print_machine(argv: list[str] | None) -> int:
    parser = Parser(
        prog="python -m experiments.device", description="Print the name of this machine's folder below results/."
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    kind, name, _ = pick_device(parser.parse_args(argv).device)
    print(cfg.machine_name(kind, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
