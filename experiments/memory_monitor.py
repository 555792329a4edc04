"""Sample the memory of a device and of one process into a CSV file, from a process of its own.

    python -m experiments.memory_monitor --pid PID --output memory.csv [--interval 0.05] [--device auto]

--device is auto (the first one that CUDA_VISIBLE_DEVICES leaves), none, or the start of a UUID. Without NVML, or where
it lists no such device, resident memory alone is sampled, with a word on stderr.

Sizes are bytes, times are seconds. resident_bytes, cpu_percent and process_device_bytes are those of the watched
process; the last is read every PROCESS_PERIOD, because reading the list may keep processes from allocating, and is
empty where NVML does not list it (before it uses the device, and in many containers). The sampler ends with the
watched process, or when it is killed: each row is written at once.
"""

import contextlib
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pynvml

from experiments.run_options import Parser
from experiments.run_record import SAMPLE_COLUMNS
from rloo_memory.errors import program
from rloo_memory.nvml import Device, by_uuid, nvml_devices, visible_devices

PROCESS_PERIOD = 0.5
START_TIMEOUT = 10.0  # NVML can take seconds


def find_device(wanted: str) -> Device | None:
    """The device to sample, None for none; says on stderr why there is none."""
    if wanted == "none":
        return None
    try:
        devices = nvml_devices()
        shown = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        device = (shown[0] if shown else None) if wanted == "auto" else by_uuid(wanted, devices)
        why = f"NVML lists no device {wanted}"
    except pynvml.NVMLError as error:
        device, why = None, f"NVML does not answer ({error})"
    if device is None:
        print(f"memory_monitor: {why}: sampling resident memory only", file=sys.stderr)
    return device


def answer(question, device: Device | None):
    """What NVML says; None without a device, and where it does not tell: MIG has no utilization, a GPU that shares the
    host's memory no memory of its own, a lost GPU nothing."""
    try:
        return question(device.handle) if device else None
    except pynvml.NVMLError:
        return None


def sample(process: psutil.Process, output, interval: float, device: Device | None) -> None:
    """Write a header and a row every `interval` seconds to `output` until `process` has ended."""
    rows = csv.writer(output, lineterminator="\n")
    rows.writerow(SAMPLE_COLUMNS)
    began, start, tick = time.time(), time.monotonic(), 0
    own, own_due = None, 0.0
    process.cpu_percent()  # psutil measures from the call before
    while resident := process.memory_info().rss:  # a zombie has none
        elapsed = time.monotonic() - start
        # Version 1: used + free = total, so it counts the driver's own share, as "out of memory" does
        memory = answer(pynvml.nvmlDeviceGetMemoryInfo, device)
        utilization = answer(pynvml.nvmlDeviceGetUtilizationRates, device)
        if elapsed >= own_due:
            listed = answer(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, device) or []
            own = next((entry.usedGpuMemory for entry in listed if entry.pid == process.pid), None)
            own_due = elapsed + PROCESS_PERIOD
        rows.writerow((
            f"{began + elapsed:.6f}", f"{elapsed:.6f}", memory and memory.used, memory and memory.total,
            utilization and utilization.gpu, own, resident, process.cpu_percent() if tick else None,
            psutil.virtual_memory().used,
        ))  # fmt: skip
        # Deadlines are start + n * interval: no drift, and a late row skips deadlines instead of bunching up
        tick = max(tick, int((time.monotonic() - start) / interval)) + 1
        time.sleep(max(0.0, start + tick * interval - time.monotonic()))


def start_monitor(output: Path, interval: float, device: str) -> subprocess.Popen:
    """Start sampling this process into `output`, where no file is; returns when the first row is there. Killing it
    loses none. Raises RuntimeError where it ended instead; it has said why on stderr."""
    command = [sys.executable, "-m", "experiments.memory_monitor", "--pid", os.getpid(), "--output", output.absolute()]
    process = subprocess.Popen(
        [*map(str, command), "--interval", str(interval), "--device", device],
        cwd=Path(__file__).resolve().parent.parent,  # where `experiments` is found
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is for this process; the sampler sees its end
    )
    deadline = time.monotonic() + START_TIMEOUT
    while not (output.exists() and output.read_bytes().count(b"\n") > 1) and time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError("the memory sampler did not start")
        time.sleep(0.01)
    return process


@program("memory_monitor")
def main(argv: list[str] | None) -> int:
    parser = Parser("memory_monitor", __doc__, place=False)
    parser.add_argument("--pid", type=int, required=True, help="the process to watch")
    parser.add_argument("--output", type=Path, required=True, help="the CSV file to write, in a folder that exists")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds; default 0.05")
    parser.add_argument("--device", default="auto", help="auto, none, or the start of a UUID")
    args = parser.parse_args(argv)
    with args.output.open("w", newline="", buffering=1) as output:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            sample(psutil.Process(args.pid), output, args.interval, find_device(args.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
