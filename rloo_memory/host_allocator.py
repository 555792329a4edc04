"""Another malloc for host memory: tcmalloc or jemalloc by a setting of the launcher, and a check that it is there.

    rloo-memory launch balanced --host_allocator tcmalloc

A library replaces malloc only where the dynamic linker loads it before everything else. So the launcher starts itself
again, once, with LD_PRELOAD, before anything is imported that a second start would pay for or that talks to other
processes. The process keeps its number: `accelerate launch` and torchrun see the worker that they started.
"""

import difflib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError


@dataclass(frozen=True)
class Library:
    """How the name of an allocator's file begins, first choice first, and how to get it."""

    stems: tuple[str, ...]
    install: str


LIBRARIES = {
    # the minimal one has no heap profiler, which would walk stacks
    "tcmalloc": Library(
        ("libtcmalloc_minimal.so", "libtcmalloc.so"),
        "apt install libtcmalloc-minimal4 (Fedora: dnf install gperftools-libs; conda install gperftools)",
    ),
    "jemalloc": Library(
        ("libjemalloc.so",), "apt install libjemalloc2 (Fedora: dnf install jemalloc; conda install jemalloc)"
    ),
}
CHOICES = ("system", *LIBRARIES)
RESTARTED = "HOST_ALLOCATOR_RESTARTED"  # holds the process's number, so that a child may start itself again, too


def activate(name: str, restart: bool = True) -> None:
    """Make `name` this process's malloc: replaces the process by itself with LD_PRELOAD, at most once.

    Args:
        name: one of `CHOICES`. "system" leaves everything as it is.
        restart: whether this process may be replaced. Not where another program called the launcher's code.

    Raises:
        ConfigError: the name is unknown, this is not Linux, the library is not installed, or it was preloaded and is
            not there.
    """
    if name not in CHOICES:
        near = difflib.get_close_matches(str(name), CHOICES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown host_allocator {name!r}{hint}: choose one of {', '.join(CHOICES)}")
    if name == "system":
        return
    if sys.platform != "linux":
        raise ConfigError(f"host_allocator {name!r} needs Linux's LD_PRELOAD, this is {sys.platform}; leave it out")
    if name in mapped():
        return
    preloads = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if os.environ.get(RESTARTED) == str(os.getpid()) or any(belongs(path, name) for path in preloads):
        raise ConfigError(
            f"host_allocator {name!r} is not active: LD_PRELOAD is {' '.join(preloads)!r}, but the library is not in "
            "/proc/self/maps; what the dynamic linker says about it is on stderr"
        )
    library = find(name)
    if not restart:
        raise ConfigError(f"host_allocator {name!r} is not active; start this program with LD_PRELOAD={library}")
    kept = [path for path in preloads if not any(belongs(path, other) for other in LIBRARIES)]  # one malloc
    environment = {**os.environ, "LD_PRELOAD": ":".join([str(library), *kept]), RESTARTED: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def active() -> str:
    """The allocators in this process, for a log: "system" where none of `LIBRARIES` is loaded."""
    return "+".join(mapped()) or "system"


def mapped() -> dict[str, str]:
    """Allocators that the dynamic linker has loaded into this process: name -> path of the file."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return {}
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return {name: path for name in LIBRARIES for path in sorted(paths) if belongs(path, name)}


def belongs(path: str, name: str) -> bool:
    """Whether a file is that allocator's library, by its name."""
    return path.rsplit("/", 1)[-1].startswith(LIBRARIES[name].stems)


def find(name: str) -> Path:
    """The allocator's library. Raises `ConfigError` where it is not installed."""
    ours, places = elf_kind(Path("/proc/self/exe")), folders()
    for stem in LIBRARIES[name].stems:
        for path in (path for place in places for path in sorted(place.glob(f"{stem}*"))):
            if elf_kind(path) == ours:
                return path
    raise ConfigError(f"host_allocator {name!r} is not installed; {LIBRARIES[name].install}")


def folders() -> list[Path]:
    """Where to look: LD_LIBRARY_PATH, this Python's own (conda), the linker's cache, and its usual folders."""
    try:
        cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    except OSError:  # musl has none
        cache = ""
    cached = [line.rsplit(" => ", 1)[1] for line in cache.splitlines() if "malloc" in line and " => " in line]
    usual = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
    given = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [*given, f"{sys.base_prefix}/lib", *(str(Path(path).parent) for path in cached), *usual]
    return [Path(place) for place in dict.fromkeys(places)]


def elf_kind(path: Path) -> bytes | None:
    """Word size, byte order and processor from an ELF file's header: a 32-bit library may lie beside the right one."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else None
