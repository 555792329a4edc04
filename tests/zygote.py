"""Runs a script, or a module by name, in a process that `multiprocessing` forks from one with torch, transformers and
peft: they take longer to import than most scripts to run. No TRL: which one, is the script's choice."""

import gc
import os
import runpy
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
PRELOADED = ["datasets", "peft", "transformers.trainer"]


def run(argv: list[str], stdout: str, stderr: str) -> None:
    gc.freeze()  # each training collects garbage several times, and would look through all that was imported
    for path, descriptor in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = ROOT
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]) or ROOT)
    run = runpy.run_path if argv[0].endswith(".py") else runpy.run_module
    run(argv[0], run_name="__main__")
