"""Find, build and load an arm's TRL. `python -m experiments.builds` builds those of all arms."""

import functools
import json
import subprocess
import sys
from pathlib import Path

from experiments.arms import ARMS, Arm
from experiments.config import ROOT
from rloo_memory.errors import ConfigError, program


def build(arm: Arm) -> Path:
    """Build the arm's TRL, if it is not there, and return where. Arms of the same patches share a build. Raises
    `ConfigError` with the reason in one line."""
    if arm.patches:
        name, choice = "+".join(Path(patch).stem for patch in arm.patches), ["--patches", ",".join(arm.patches)]
    else:
        name, choice = f"{arm.line}-untouched", ["--no-patches"]
    dest = ROOT / ".build" / "fork" / name
    command = [sys.executable, str(ROOT / "trl" / "fork.py"), "build", arm.line, str(dest), *choice]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ConfigError("; ".join(result.stderr.split("\n")).strip("; ") or f"{' '.join(command)} failed")
    return dest


@functools.cache
def use_fork(arm: Arm) -> list[str]:
    """`build` the arm's TRL, put it first on the path, and check that it is what `import trl` gives.

    Returns the names of the patches in it, as the build recorded them. Raises `ConfigError` with the reason in one
    line.
    """
    dest = build(arm)
    facts, wanted = json.loads((dest / "FORK.json").read_text()), dest / "trl" / "__init__.py"
    sys.path.insert(0, str(dest))
    import trl

    if Path(trl.__file__).resolve() != wanted.resolve():
        raise ConfigError(
            f"`import trl` gives {trl.__file__}, not {wanted}; start a fresh Python process for each arm"
        )
    return list(facts["patches"])


@program("builds")
def main(argv: list[str] | None) -> int:
    for arm in ARMS.values():
        build(arm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
