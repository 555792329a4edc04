"""rloo-memory: what a training of TRL's RLOO or GRPO will take, what makes it fit, and the training.

    rloo-memory plan      predict the peak of each phase
    rloo-memory doctor    find changes that make a training fit, and write them down
    rloo-memory launch    train with a profile
    rloo-memory check     say what keeps trainings from this machine's GPU

Each has a --help, and `rloo-memory --version` says what is installed. The same from Python:
`from rloo_memory.plan.ask import predict`.
"""

import importlib
import sys
from importlib.metadata import version

COMMANDS = {
    "plan": "rloo_memory.plan.__main__",
    "doctor": "rloo_memory.plan.doctor",
    "launch": "rloo_memory.launch.__main__",
    "check": "rloo_memory.cuda_check",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first word names with the words behind it. Returns its exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if name == "--version":
        print(f"rloo-memory {version('rloo-memory')}, trl {version('trl')}")
        return 0
    if name not in COMMANDS:
        print(f"rloo-memory: no command {name!r}; choose one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[name]).main(rest)


if __name__ == "__main__":
    sys.exit(main())
