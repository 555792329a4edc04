"""`python -m experiments.hooks.teacher_student` with both trainers and prefix sharing, and once without: the numbers
that it prints, step, reward and parts of every update."""

import contextlib
import io
import json
import re

from experiments.hooks import teacher_student


def numbers(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert teacher_student.main(["--steps", "2", *arguments]) == 0
    return [[float(x) for x in re.findall(r"-?\d+\.?\d*", row)] for row in printed.getvalue().splitlines()]


runs = {"stock": numbers()} | {name: numbers("--algorithm", name, "--shared") for name in ("rloo", "grpo")}
print(json.dumps(runs))
