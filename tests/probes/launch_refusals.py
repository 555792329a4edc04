"""Runs the launcher in this process on each of the command lines that stdin has as JSON. Prints for each its exit
code, what it wrote to stderr, and whether torch is imported afterwards."""

import contextlib
import io
import json
import sys

from rloo_memory.launch.__main__ import main

results = []
for argv in json.load(sys.stdin):
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = main(argv)
    results.append({"code": code, "error": error.getvalue(), "torch": "torch" in sys.modules})
print(json.dumps(results))
