"""examples/teacher_student.py with both trainers and prefix sharing, and once without: the
numbers it prints, step, reward and parts of every update; and what the reward alone imports of this repository."""

import contextlib
import io
import json
import re
import sys

import rloo_memory.hooks.teacher_student  # noqa: F401

harness = sorted(name for name in sys.modules if name.startswith(("rloo_memory", "experiments")))
from examples import teacher_student  # noqa: E402


def numbers(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert teacher_student.main(["--steps", "2", *arguments]) == 0
    return [[float(x) for x in re.findall(r"-?\d+\.?\d*", row)] for row in printed.getvalue().splitlines()]


runs = {"stock": numbers()} | {name: numbers("--algorithm", name, "--shared") for name in ("rloo", "grpo")}
print(json.dumps({"harness": harness, **runs}))
