"""The careful reading and writing of one file, and how a command ends when a file cannot be used."""

import contextlib
import csv
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

MAX_NUMBER = 10**18  # more than any count, size or time in these files
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LoadError(Exception):
    """A results file that cannot be used: one line that names the file, what is wrong and the remedy."""


def read_text(path: Path, remedy: str) -> str:
    """The file's text, less a byte order mark. Raises LoadError when it is missing, unreadable or not text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise LoadError(f"{path}: the file is missing; {remedy}") from None
    except UnicodeDecodeError:
        raise LoadError(f"{path}: not a text file; {remedy}") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    if "\0" in text:
        raise LoadError(f"{path}: not a text file, it holds NUL bytes; {remedy}")
    return text


def read_json(path: Path, remedy: str) -> dict:
    """The file's JSON object. Raises LoadError when it is not one."""
    try:
        value = json.loads(read_text(path, remedy))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds no JSON object; {remedy}")
    return value


def read_csv(path: Path, columns: Sequence[str], remedy: str, text_columns: Sequence[str] = ()) -> pd.DataFrame:
    """The file's complete lines; every named column not in `text_columns` as numbers (empty fields as NaN).

    A last line without its newline was cut off by a kill and is left out. Raises LoadError naming the file and line.
    """
    text = read_text(path, remedy)
    text = text[: text.rfind("\n") + 1]
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise LoadError(f"{path}: not valid CSV ({error}); {remedy}") from None
    if not rows:
        raise LoadError(f"{path}: holds no complete line, not even a header; {remedy}")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise LoadError(f"{path}: lacks the column {', '.join(missing)}; {remedy}")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise LoadError(f"{path}: line {number} has {len(row)} fields, the header {len(rows[0])}; {remedy}")
    numeric = [name for name in columns if name not in text_columns]
    kinds = {name: str for name in rows[0] if name not in numeric}
    frame = pd.read_csv(io.StringIO(text), dtype=kinds, keep_default_na=False, na_values=dict.fromkeys(numeric, ""))
    for name in numeric:
        numbers = pd.to_numeric(frame[name], errors="coerce")
        bad = numbers.isna() & frame[name].notna()
        if bad.any():
            row = int(bad.idxmax())
            raise LoadError(f"{path}: line {row + 2}, {name}: {frame[name][row]!r} is not a number; {remedy}")
        frame[name] = numbers
    return frame


def read_rows(path: Path, numbers: Sequence[str], program: str) -> pd.DataFrame:
    """The rows, at least one, of a CSV file that `python -m PROGRAM` writes; all `numbers` given. Raises LoadError."""
    rows = read_csv(path, numbers, f"run python -m {program}")
    if rows.empty:
        raise LoadError(f"{path}: holds no rows; run python -m {program} again")
    for name in numbers:
        if (bad := ~rows[name].between(-MAX_NUMBER, MAX_NUMBER)).any():
            line = int(bad.idxmax()) + 2
            raise LoadError(f"{path}: line {line}, {name} is empty or no usable number; run python -m {program} again")
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
