"""The launcher; says how its process ends."""

import atexit
import os
import sys

import torch.distributed

from rloo_memory.launch import __main__ as launch


class Interpreter:
    def __del__(self, write=os.write):
        write(1, b"the interpreter is taken down\n")


def at_exit():
    os.write(1, b"what is registered for the exit runs\n")
    if torch.distributed.is_initialized():
        os.write(1, b"a group is left\n")


if __name__ == "__main__":
    atexit.register(at_exit)
    kept = Interpreter()
    sys.exit(launch.main(sys.argv[1:]))
