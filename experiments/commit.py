"""Which code runs."""

import os
import subprocess
from pathlib import Path

SOURCES = ("rloo_memory", "experiments", "trl", "requirements.lock")
# For git: pages, and what was measured, which the planner says, decide nothing that is measured
PATHS = (*SOURCES, ":(exclude)*.md", ":(exclude)rloo_memory/plan/accuracy/measured.json")


def source_commit() -> str:
    """The last commit that changed `SOURCES` in the clone that this file is part of: later ones, of pages or results,
    run the same code. With a "-dirty" mark when they differ. Elsewhere what SOURCE_COMMIT says, or "unknown"."""
    clone = Path(__file__).resolve().parent.parent

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(clone), *command], capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", "experiments/commit.py")  # it may lie in another project's environment
        commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", *PATHS).strip()
        changed = git("status", "--porcelain", "--", *PATHS).strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SOURCE_COMMIT", "unknown")
    return f"{commit}-dirty" if changed else commit


def is_same_code(then: str, now: str) -> bool:
    """Whether what one commit's code measured is what another's would. Changed, uncommitted code is never the same,
    not even as itself."""
    return then == now != "unknown" and not now.endswith("-dirty")
