"""The TRL that is installed."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rloo_memory.errors import ConfigError


def trl_version() -> tuple[int, ...]:
    """Such as (1, 16). Raises `ConfigError` where there is none, or one older than 1.14."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ConfigError("no trl is installed: pip install 'trl>=1.14'") from None
    release = tuple(map(int, found.split(".")[:2]))
    if release < (1, 14):
        raise ConfigError(f"trl {found} is older than 1.14: pip install 'trl>=1.14'")
    return release


def versions_here() -> str:
    """Of the packages that predictions depend on."""
    return ", ".join(f"{name} {version(name)}" for name in ("trl", "torch", "transformers"))


def need_trl() -> Path:
    """The folder from which `import trl` takes one that planner and launcher know. Raises `ConfigError` where it
    would take something else."""
    trl_version()
    return Path(importlib.util.find_spec("trl").origin).parent.parent


def lm_head_here() -> str:
    """Of the trainers: its name in `rloo_memory.plan.simulation.heads`."""
    return "full_logits_in_a_kernel" if trl_version() < (1, 15) else "fused"


def wrong_on_cpu() -> str | None:
    """Why this TRL trains on no CPU; None if it does."""
    if trl_version() != (1, 15):
        return None
    return "TRL 1.15 needs Triton for its LM head, so it trains on no CPU: pip install 'trl>=1.16', or use a GPU"
