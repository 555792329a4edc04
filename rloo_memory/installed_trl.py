"""The TRL that is installed: as released, or this project's fork."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rloo_memory.errors import ConfigError


def need_trl() -> Path:
    """The folder from which `import trl` takes one that planner and launcher know, 1.15 or newer. Raises
    `ConfigError` where it would take something else."""
    spec = importlib.util.find_spec("trl")
    package = Path(spec.origin).parent if spec and spec.origin else None
    if package is None or not (package / "kernels" / "chunked_logprob.py").exists():
        try:
            there = f"trl {version('trl')} is older than 1.15"
        except PackageNotFoundError:
            there = "no trl is installed"
        raise ConfigError(f"{there}: pip install 'trl>=1.15'")
    return package.parent
