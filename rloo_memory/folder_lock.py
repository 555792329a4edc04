"""A folder that one process writes at a time."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

from rloo_memory.errors import ConfigError


@contextlib.contextmanager
def owned(folder: Path, patience: float = 5.0, remedy: str = "another --results") -> Iterator[None]:
    """`folder` is made if need be, and no other process that asks for it as well has it while this block runs.

    The kernel lets go of it when this process ends, however it ends. Raises `ConfigError` naming the process that
    still has it after `patience` seconds, or why the folder cannot be had, with the `remedy`: what the caller's user
    can write instead. It is removed if it is empty afterwards.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose {remedy}") from None
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
