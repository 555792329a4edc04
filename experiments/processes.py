"""How a run's process is handed its work, ends with the one that started it, and owns its folder."""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from experiments.config import ConfigError, RunConfig, Stopped, shown

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Launch:
    """A run as one process hands it to another: what to run, where its folder goes, and how both know each other."""

    config: RunConfig
    machine: Path  # results/<machine>, absolute
    token: str  # written into run.json: a record with another one is of another launch
    parent: int | None = None  # process id; when that process ends, so does the run

    def write(self, path: Path) -> None:
        fields = {**vars(self), "config": self.config.as_dict(), "machine": str(self.machine)}
        path.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Launch":
        """What `write` wrote. Raises `ConfigError` naming the file."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            launch = cls(**{**fields, "machine": Path(fields["machine"])})
            if not isinstance(launch.token, str) or type(launch.parent) not in (int, type(None)):
                raise TypeError
            return cls(RunConfig.from_dict(launch.config), launch.machine.absolute(), launch.token, launch.parent)
        except OSError as error:
            raise ConfigError(f"cannot read --config {shown(str(path))}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(f"--config {shown(str(path))}: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"--config {shown(str(path))} holds no run; leave the option out and name --arm and --k"
            ) from None


def new_token() -> str:
    """What tells one launch from another."""
    return uuid.uuid4().hex[:16]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stopped` in here, the first of them alone: what it leads to is not interrupted. One
    that was ignored before (nohup, a job in the background) still is."""

    def stop(number, frame):
        ignore_signals()
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From here on SIGINT and SIGTERM do nothing: the run's end is being written."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """Let the kernel send this process SIGTERM when process `parent`, which started it, ends for whatever reason."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        raise Stopped(signal.SIGTERM)


def end_group(process: subprocess.Popen, number: int, patience: float) -> None:
    """Tell the leader of a group to end, and after `patience` seconds kill it and whatever it started."""
    if process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def owned(folder: Path, patience: float = 5.0, remedy: str = "another --machine") -> Iterator[None]:
    """`folder` is made if need be, and no other process that asks for it as well has it while this block runs.

    The kernel lets go of it when this process ends, however it ends. Raises `ConfigError` naming the process that
    still has it after `patience` seconds, or why the folder cannot be had. It is removed if it is empty afterwards.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --results") from None
    deadline = time.monotonic() + patience  # a run whose suite was killed needs a moment to end
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = holder(handle)
                os.close(handle)
                raise ConfigError(
                    f"{folder} is being written by {owner}; wait for its end, or choose {remedy}"
                ) from None
            time.sleep(0.05)
        except OSError:
            break  # a file system without locks: go on without
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(handle)


def holder(handle: int) -> str:
    """The process that has locked the open folder `handle`, as /proc/locks knows it."""
    inode = str(os.fstat(handle).st_ino)
    with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # number, kind, mode, access, pid, major:minor:inode, start, end
            if words[1] == "FLOCK" and words[5].split(":")[-1] == inode:
                began = datetime.fromtimestamp(psutil.Process(int(words[4])).create_time(), UTC)
                return f"process {words[4]} (since {began.isoformat(sep=' ', timespec='seconds')})"
    return "another process"
