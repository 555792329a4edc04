"""Runs the launcher in this process on each of the command lines that stdin has as JSON. Prints for each its exit
code, what it wrote to stdout and stderr, and whether torch is imported afterwards."""

import contextlib
import io
import json
import sys

from rloo_memory.launch.__main__ import main

results = []
for argv in json.load(sys.stdin):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(argv)
    results.append({"code": code, "out": out.getvalue(), "error": error.getvalue(), "torch": "torch" in sys.modules})
print(json.dumps(results))
