"""Runs scripts in forks of a process that has imported torch, transformers and peft, which takes longer than most do.

Reads requests, a JSON object a line: "argv", "stdout" and "stderr" (files to write to). Answers each with the exit
code. Imports no TRL: which one, is the script's choice.
"""

import gc
import json
import os
import runpy
import sys
import traceback

import datasets  # noqa: F401
import peft  # noqa: F401
import transformers.trainer  # noqa: F401


def run(argv: list[str], stdout: str, stderr: str) -> None:
    """The script `argv[0]` in this process, which ends with it."""
    code = 1
    try:
        for path, descriptor in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


gc.freeze()  # each training collects garbage several times, and would look through all that was imported
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
