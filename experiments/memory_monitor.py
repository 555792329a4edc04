"""Sample the memory of a device and of one process into a CSV file, from a process of its own.

    python -m experiments.memory_monitor --pid PID --output memory.csv [--interval 0.05] [--device auto]

--device is auto (the first visible one, or none where there is none), none, an index among the devices that
CUDA_VISIBLE_DEVICES leaves visible, or the start of a UUID. Without NVML it samples resident memory and says so.

Sizes are bytes, times are seconds. What the columns hold:

* device_used_bytes, device_total_bytes, resident_bytes: read for every row.
* device_utilization_percent, cpu_percent, host_used_bytes: read at most every SLOW_PERIOD, repeated in the rows
  between. The kernel counts CPU time in ticks of 10 ms, so cpu_percent moves in coarse steps.
* process_device_bytes: read every PROCESS_PERIOD, because reading the list may keep processes from allocating.
* resident_bytes and cpu_percent are the watched process alone. process_device_bytes adds its children, and is empty
  where NVML does not list them (before they use the device, and in many containers), and where it lists process ids
  that are not there: those of a container's host, of which one may be ours by chance. The report says which it was.

The sampler ends when the watched process ends, or on SIGTERM or SIGINT, and then prints one JSON line: an
IntervalReport and the name of the device. Exit codes: 0 finished, 2 bad arguments, 3 the file could not be written on.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pynvml

from experiments.run_record import SAMPLE_COLUMNS
from rloo_memory.nvml import Device, choose_device, nvml_devices

MIN_INTERVAL, MAX_INTERVAL = 0.01, 1.0
SLOW_PERIOD, PROCESS_PERIOD = 0.05, 0.5
START_TIMEOUT = 10.0


@dataclass(frozen=True)
class IntervalReport:
    """How well the asked-for interval was kept, in seconds; the gaps are None with fewer than two samples.

    `device_processes` says what NVML listed of processes that use the device: `ours`, `not ours`, `foreign` (ids that
    are not there, twice in a row), or None where it was not asked."""

    requested_interval_s: float
    achieved_interval_s: float | None
    longest_gap_s: float | None
    samples: int
    device_processes: str | None = None


def interval_report(timestamps: Sequence[float], requested: float) -> IntervalReport:
    """The median and the longest gap between `timestamps` (seconds, in the order taken)."""
    gaps = sorted(later - earlier for earlier, later in zip(timestamps, timestamps[1:], strict=False))
    if not gaps:
        return IntervalReport(requested, None, None, len(timestamps))
    median = (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2
    return IntervalReport(requested, round(median, 6), round(gaps[-1], 6), len(timestamps))


def find_device(wanted: str) -> Device | None:
    """The device to sample for --device `wanted` under this process's CUDA_VISIBLE_DEVICES; None: sample none.

    Says on stderr why there is none. Raises ValueError when NVML works and does not know the index or UUID asked for.
    """
    if wanted == "none":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        devices = nvml_devices()
    except pynvml.NVMLError as error:
        _say(f"NVML does not answer ({error}): sampling resident memory only")
        return None
    device = choose_device(wanted, devices, visible)
    if device is None:
        setting = "NVML lists no GPU" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        _say(f"no device is visible ({setting}): sampling resident memory only")
    # CUDA counts the fastest GPU first unless told otherwise, NVML goes by PCI bus: equal only where GPUs are alike.
    by_index = wanted == "auto" or wanted.isdigit()
    by_index = by_index and (visible is None or any(entry.strip().isdigit() for entry in visible.split(",")))
    unlike = len({d.name for d in devices if not d.uuid.startswith("MIG-")}) > 1
    if device and by_index and unlike and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        _say(f"unlike GPUs, counted by PCI bus: sampling {device.name}; set CUDA_DEVICE_ORDER=PCI_BUS_ID for the run")
    return device


class _ProcessUse:
    """What NVML says that the watched process and its children use on the device."""

    def __init__(self, pid: int):
        self.pid, self.ours = pid, {}  # id -> whether it is the watched one or below it: walking up is slow
        self.unknown = 0  # reads in a row that listed an id that is not there
        self.seen: str | None = None

    def read(self, device: Device) -> int | None:
        """Bytes; None where it lists none of them, or an id that is not there: then none can be trusted."""
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device.handle)
        # A process that has just ended may still be listed, once
        self.unknown = 0 if all(_exists(entry.pid) for entry in listed) else self.unknown + 1
        if self.unknown > 1 or self.seen == "foreign":
            self.seen = "foreign"
        if self.unknown or self.seen == "foreign":
            return None
        for entry in listed:
            if entry.pid not in self.ours:
                self.ours[entry.pid] = entry.pid == self.pid or _is_below(entry.pid, self.pid)
        mine = [entry.usedGpuMemory for entry in listed if self.ours[entry.pid]]
        self.seen = "ours" if mine or self.seen == "ours" else "not ours"
        sizes = [size for size in mine if size is not None]
        return sum(sizes) if sizes else None


def _exists(pid: int) -> bool:
    try:
        return psutil.pid_exists(pid)
    except OverflowError:  # no number of a process
        return False


def _is_below(pid: int, ancestor: int) -> bool:
    try:
        return any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:  # gone, or not in our view of the machine
        return False


def sample(process: psutil.Process, output, interval: float, device: Device | None, stop: int) -> IntervalReport:
    """Write a header and a row every `interval` seconds to `output` (an unbuffered binary file).

    Returns when `process` has ended or file descriptor `stop` becomes readable. Raises OSError when a row cannot be
    written; the file then ends with the last whole row. NVML failing on the way leaves its cells empty, and a device
    that does not tell its memory leaves those two empty.
    """
    _write_line(output, SAMPLE_COLUMNS)
    process.cpu_percent()  # psutil measures from the call before
    utilization = process_device = cpu = host = None
    processes = _ProcessUse(process.pid)
    said = False
    times = array("d")
    slow_due = processes_due = 0.0
    tick = 0
    start, began = time.monotonic(), time.time()
    while True:
        elapsed = time.monotonic() - start
        timestamp = began + elapsed  # a clock that is set meanwhile does not part the samples from the phases
        used = total = None
        answers = device is not None
        if device:
            try:
                # Version 1: used + free = total, so it counts the driver's own share, as "out of memory" does.
                memory = pynvml.nvmlDeviceGetMemoryInfo(device.handle)
                used, total = memory.used, memory.total
            except pynvml.NVMLError as error:
                # Not supported where the device shares the host's memory (GB10): it tells the rest
                answers = isinstance(error, (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission))
                if not said:
                    lacks = "does not tell its memory" if answers else "does not answer"
                    _say(f"{device.name} {lacks} ({error}): those cells stay empty")
                said = True
        try:
            resident = process.memory_info().rss
            if resident == 0 or not process.is_running():  # a zombie has no memory; a reused pid is not running
                break
            if elapsed >= slow_due:
                slow_due = elapsed + SLOW_PERIOD * 0.9  # the margin keeps a tick that comes early from being missed
                cpu = process.cpu_percent() if times else None
                host = psutil.virtual_memory().used
                utilization = None
                if answers:
                    with contextlib.suppress(pynvml.NVMLError):  # MIG has no utilization
                        utilization = pynvml.nvmlDeviceGetUtilizationRates(device.handle).gpu
            if elapsed >= processes_due and answers:
                processes_due, process_device = elapsed + PROCESS_PERIOD, None
                with contextlib.suppress(pynvml.NVMLError):
                    process_device = processes.read(device)
        except psutil.NoSuchProcess:
            break
        if not answers:
            utilization = process_device = None
        cells = (timestamp, elapsed, used, total, utilization, process_device, resident, cpu, host)
        _write_line(output, cells)
        times.append(elapsed)
        # Deadlines are start + n * interval: no drift, and a late row skips deadlines instead of bunching up.
        tick = max(tick, int((time.monotonic() - start) / interval)) + 1
        if select.select([stop], [], [], max(0.0, start + tick * interval - time.monotonic()))[0]:
            break
    return replace(interval_report(times, interval), device_processes=processes.seen)


def _write_line(output, cells: Sequence[object]) -> None:
    """Write one CSV line at once, or raise OSError and leave nothing of it."""
    texts = ("" if cell is None else f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in cells)
    line = (",".join(texts) + "\n").encode()
    written = 0
    try:
        while written < len(line):
            written += output.write(line[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(output.fileno(), os.fstat(output.fileno()).st_size - written)
        raise


def _say(text: str, stream: int = 2) -> None:
    """One line to stderr (2) or stdout (1), past Python's buffers: a reader that is gone must not fail the exit."""
    prefix = "memory_monitor: " if stream == 2 else ""
    with contextlib.suppress(OSError):
        os.write(stream, f"{prefix}{text}\n".encode())


def _stop_on_signals() -> int:
    """A file descriptor that becomes readable on SIGTERM or SIGINT, so that a row in the making is finished."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return readable


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        _say(message)
        sys.exit(2)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not MIN_INTERVAL <= value <= MAX_INTERVAL:
        limits = f"{MIN_INTERVAL:g} to {MAX_INTERVAL:g} seconds"
        raise argparse.ArgumentTypeError(f"{text!r} is not within {limits}; choose one that is, 0.05 by default")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see the top of this file)."""
    stop = _stop_on_signals()
    parser = _Parser(prog="memory_monitor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pid", type=int, required=True, help="the process to watch")
    parser.add_argument("--output", type=Path, required=True, help="the CSV file to write, in a folder that exists")
    parser.add_argument("--interval", type=_interval, default=0.05, help="seconds, 0.01 to 1; default 0.05")
    parser.add_argument("--device", default="auto", help="auto, none, an index among the visible ones, or a UUID")
    args = parser.parse_args(arguments)
    try:
        process = psutil.Process(args.pid)
        device = find_device(args.device)
    except (psutil.Error, ValueError) as error:
        parser.error(str(error))
    try:
        output = open(args.output, "wb", buffering=0)
    except OSError as error:
        parser.error(f"cannot write {args.output}: {error.strerror}")
    with output:
        try:
            report = sample(process, output, args.interval, device, stop)
        except OSError as error:
            _say(f"stopped: cannot write on {args.output}: {error.strerror}; the rows so far are whole")
            return 3
    _say(json.dumps(asdict(report) | {"device": device.name if device else None}), stream=1)
    return 0


def start_monitor(output: Path, interval: float = 0.05, device: str = "auto") -> subprocess.Popen:
    """Start sampling this process into `output` every `interval` seconds; returns once the first row is there.

    A slow start (NVML can take seconds) is waited for up to START_TIMEOUT and then left to finish by itself. Raises
    RuntimeError with the sampler's own words when it ended instead. It ends with this process, stopped or not.
    """
    output = Path(output).absolute()
    with contextlib.suppress(OSError):
        output.unlink()  # an older file's rows must not pass for the first row
    command = [sys.executable, "-m", "experiments.memory_monitor", "--pid", str(os.getpid()), "--output", str(output)]
    process = subprocess.Popen(
        [*command, "--interval", str(interval), "--device", device],
        cwd=Path(__file__).resolve().parent.parent,  # where `experiments` is found
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal is for this process; the sampler sees its end
    )
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        with contextlib.suppress(FileNotFoundError):
            if output.read_bytes().count(b"\n") > 1:  # it did start, even if it has been killed since
                break
        if ended:
            raise RuntimeError(f"the memory sampler did not start: {process.communicate()[1].strip()}")
        time.sleep(0.01)
    return process


def stop_monitor(process: subprocess.Popen, timeout: float = 5.0) -> IntervalReport | None:
    """Stop a sampler of start_monitor, waiting up to `timeout` seconds; what it said on stderr is passed on.

    None when it left no report: it was killed, could not write, or had to be killed here.
    """
    process.terminate()
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
    sys.stderr.write(stderr)
    if process.returncode != 0 or not stdout:
        return None
    report = json.loads(stdout)
    del report["device"]
    return IntervalReport(**report)


if __name__ == "__main__":
    sys.exit(main())
