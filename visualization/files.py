"""The careful reading and writing of one file, and how a command ends when a file cannot be used."""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LoadError(Exception):
    """A results file that cannot be used: one line that names the file, what is wrong and the remedy."""


def read_text(path: Path, remedy: str) -> str:
    """The file's text, less a byte order mark. Raises LoadError when it is missing or not text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "the file is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise LoadError(f"{path}: {why}; {remedy}") from None


def read_json(path: Path, remedy: str) -> dict:
    """The file's JSON object. Raises LoadError when it is not one."""
    try:
        value = json.loads(read_text(path, remedy))
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds no JSON object; {remedy}")
    return value


def read_csv(path: Path, numbers: Sequence[str], remedy: str) -> pd.DataFrame:
    """The file's complete lines: the columns `numbers` as numbers, NaN where empty, the others as text.

    A last line without its newline was cut off by a kill and is left out. Raises LoadError that names the file and
    what of `numbers` is missing or none.
    """
    text = read_text(path, remedy)
    try:
        frame = pd.read_csv(io.StringIO(text[: text.rfind("\n") + 1]), dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise LoadError(f"{path}: no CSV ({error}); {remedy}") from None
    if missing := [name for name in numbers if name not in frame]:
        raise LoadError(f"{path}: lacks the column {', '.join(missing)}; {remedy}")
    for name in numbers:
        found = pd.to_numeric(frame[name].replace("", None), errors="coerce")
        if (bad := found.isna() & (frame[name] != "")).any():
            row = int(bad.idxmax())
            raise LoadError(f"{path}: line {row + 2}, {name}: {frame[name][row]!r} is not a number; {remedy}")
        frame[name] = found
    return frame


def read_rows(path: Path, numbers: Sequence[str], program: str) -> pd.DataFrame:
    """The rows, at least one, of a CSV file that `python -m PROGRAM` writes; all `numbers` given. Raises LoadError."""
    rows = read_csv(path, numbers, f"run python -m {program}")
    if rows.empty or rows[list(numbers)].isna().any(axis=None):
        raise LoadError(f"{path}: holds no rows, or lacks a number in one; run python -m {program} again")
    return rows


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write under. What was written takes the place of `path` in the end, or nothing of it is
    left. Raises OSError that names `path`."""
    staging = path.with_name(f".{os.getpid()}.{path.name}")  # its ending says what kind of picture it is
    try:
        yield staging
        os.replace(staging, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


def write_text(path: Path, text: str) -> None:
    """Write the whole text or nothing. Raises OSError that names `path`."""
    with whole_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def run_cli(main: Callable[[], int]) -> int:
    """Run a command; a LoadError or a folder that cannot be written becomes one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # where the output has no place for our marks
    try:
        return main()
    except LoadError as error:
        message = str(error)
    except OSError as error:
        remedy = "make room and run it again" if error.errno in DISK_FULL else "make it a place that can be written"
        message = f"{error.filename}: {error.strerror}; {remedy}" if error.filename else str(error)
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
