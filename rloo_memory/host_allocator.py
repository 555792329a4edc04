"""Another malloc for host memory: tcmalloc or jemalloc by a setting of the launcher, and a check that it is there.

    rloo-memory launch balanced --host_allocator jemalloc

A library replaces malloc only where the dynamic linker loads it before everything else. So the launcher starts itself
again, once, with LD_PRELOAD. The process keeps its number: torchrun sees the worker that it started.
"""

import os
import sys
from pathlib import Path

from rloo_memory.errors import ConfigError, choose

LIBRARIES = {"tcmalloc": "libtcmalloc_minimal.so.4", "jemalloc": "libjemalloc.so.2"}
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
RESTARTED = "HOST_ALLOCATOR_RESTARTED"  # holds the process's number: a child may start itself again, too


def activate(name: str, restart: bool) -> None:
    """Make `name` ("system" leaves it as it is) this process's malloc: replaces the process by itself, at most once,
    and not at all without `restart`, as where another program called the launcher's code. Raises `ConfigError`."""
    choose("host_allocator", name, ("system", *LIBRARIES))
    if name == "system" or name in mapped():
        return
    library = LIBRARIES[name]
    if not restart:
        raise ConfigError(f"host_allocator {name!r} is not loaded; start this program with LD_PRELOAD={library}")
    if os.environ.get(RESTARTED) == str(os.getpid()):
        raise ConfigError(f"host_allocator {name!r} is not loaded: no {library} here; apt install {PACKAGES[name]}")
    preloads = " ".join([library, os.environ.get("LD_PRELOAD", "")]).strip()
    environment = {**os.environ, "LD_PRELOAD": preloads, RESTARTED: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def mapped() -> dict[str, str]:
    """Allocators that the dynamic linker has loaded into this process: name -> path of the file."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return {name: path for name in LIBRARIES for path in sorted(paths) if Path(path).name.startswith(f"lib{name}")}
