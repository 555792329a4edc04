"""The TRL that is installed: as released, or this project's fork."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rloo_memory.errors import ConfigError


def need_trl() -> Path:
    """The folder from which `import trl` takes one that planner and launcher know, 1.16 or newer. Raises
    `ConfigError` where it would take something else."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ConfigError("no trl is installed: pip install 'trl>=1.16'") from None
    if tuple(map(int, found.split(".")[:2])) < (1, 16):
        raise ConfigError(f"trl {found} is older than 1.16: pip install 'trl>=1.16'")
    return Path(importlib.util.find_spec("trl").origin).parent.parent
