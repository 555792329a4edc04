"""Files and folders that are whole or not there."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


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
