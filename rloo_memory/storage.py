"""Files and folders that are whole or not there, and folders that one process writes at a time."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rloo_memory.errors import ConfigError


def write_json(path: Path, value: dict) -> None:
    replace_text(path, json.dumps(value, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write through a temporary file: a reader sees the old or the new text, never half of one."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")  # a process each: two may write the same summary
    try:
        staging.write_text(text, encoding="utf-8", newline="")
        os.replace(staging, path)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the block's end, where another process was not faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        yield staging
        staging.chmod(0o755)
        try:
            staging.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
