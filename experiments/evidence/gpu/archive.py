"""The results of a device as one file that is never half: packed after every item, unpacked where they are kept."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

from rloo_memory.errors import ConfigError

MOST_BYTES = 15 * 2**20  # what comes home in one file
BULKY = ("memory.csv", "log.txt")  # of a run: the course of a peak that run.json names, and what it printed
LEFT_OUT = "LEFT_OUT.txt"


def pack(machine: Path, target: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write results/<machine> to `target`, a tar.gz, by replacing it. Files that are being written are left out.

    Above `most_bytes`, bulky files of runs are left out, the largest first, and named in `LEFT_OUT`. Returns their
    names."""
    files = {
        path.relative_to(machine.parent).as_posix(): path for path in sorted(machine.rglob("*")) if is_whole(path)
    }
    bulky = sorted((name for name in files if name.endswith(BULKY)), key=lambda name: files[name].stat().st_size)
    left: list[str] = []
    data = packed(files, left)
    while len(data) > most_bytes and bulky:
        for _ in range(max(1, len(bulky) // 4)):
            left.append(bulky.pop())
            del files[left[-1]]
        data = packed(files, left)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    staging.write_bytes(data)
    os.replace(staging, target)
    return left


def is_whole(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.name.startswith(".")


def packed(files: dict[str, Path], left: list[str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=6) as archive:
        for name, path in files.items():
            with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                add(archive, name, path.read_bytes())
        if left:
            add(archive, f"{left[0].split('/')[0]}/{LEFT_OUT}", "\n".join(left).encode() + b"\n")
    return data.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """As it is read: a file that grows meanwhile would not fit what its header says."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


def unpack(archive: Path, results: Path) -> list[str]:
    """Put what `pack` wrote below `results`. Returns the names of the machines. Raises `ConfigError`."""
    try:
        with tarfile.open(archive) as opened:
            entries = opened.getmembers()
            for entry in entries:
                path = results / entry.name
                if not entry.isfile() or ".." in path.parts or entry.name.startswith("/"):
                    raise tarfile.TarError(f"{entry.name} is no file below {results}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(opened.extractfile(entry).read())
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"cannot unpack {archive} ({error}); give the archive that `run --out` wrote") from None
    return sorted({entry.name.split("/")[0] for entry in entries})
