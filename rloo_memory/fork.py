"""The TRL that shares prompts: this project's fork, installed as `trl`."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rloo_memory.errors import ConfigError


def need_fork() -> Path:
    """The folder from which `import trl` takes the fork. Raises `ConfigError` where it would take something else."""
    spec = importlib.util.find_spec("trl")
    package = Path(spec.origin).parent if spec and spec.origin else None
    if package is None or not (package / "models" / "prefix_sharing.py").exists():
        try:
            there = f"trl {version('trl')} has"
        except PackageNotFoundError:
            there = "no trl is installed, and PyPI's has"
        raise ConfigError(
            f"{there} no prefix sharing: in the clone of rloo-memory run python trl/fork.py wheel current DIR, then "
            "pip install DIR/trl-*.whl"
        )
    return package.parent
