"""The launcher in a process of its own. The planner's process is a fork of it, which saves the imports."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile

from rloo_memory.errors import exit_code
from rloo_memory.launch import __main__ as launch
from rloo_memory.plan import ask


def in_a_fork(question: dict) -> subprocess.CompletedProcess:
    with tempfile.TemporaryFile("w+") as file:
        if (child := os.fork()) == 0:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = exit_code("plan", ask.answer, question)
            file.write(json.dumps([code, said.getvalue()]))
            file.flush()
            os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        code, said = json.load(file)
    return subprocess.CompletedProcess([], code, said, "")


ask.in_its_own_process = in_a_fork
sys.exit(launch.main(sys.argv[1:]))
