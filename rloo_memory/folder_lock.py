"""A folder that one process writes at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rloo_memory.errors import ConfigError


@contextlib.contextmanager
def owned(folder: Path, patience: float = 5.0, remedy: str = "another --results") -> Iterator[None]:
    """`folder` is made if need be, and no other process that asks for it as well has it while this block runs.

    Raises `ConfigError` where another process still has it after `patience` seconds (a run whose suite was killed
    needs a moment to end), or why the folder cannot be had, with the `remedy`: what the caller's user can write
    instead. If it was made here, it is removed where it is empty afterwards.
    """
    lock, made = FileLock(folder / ".lock"), not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience)
    except Timeout:
        raise ConfigError(
            f"{folder} is being written by another process; wait for its end, or choose {remedy}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose {remedy}") from None
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)  # who waits for it makes another
        lock.release()
        with contextlib.suppress(OSError):
            if made:
                folder.rmdir()
