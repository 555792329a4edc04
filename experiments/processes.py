"""How programs that start others, and those that they start, end together."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from rloo_memory.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stopped` in here, the first of them alone: what it leads to is not interrupted. One
    that was ignored before (nohup, a job in the background) still is."""

    def stop(number, frame):
        ignore_signals()
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From here on SIGINT and SIGTERM do nothing: the run's end is being written."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """Let the kernel send this process SIGTERM when process `parent`, which started it, ends for whatever reason: one
    that is killed hands no signal on."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        raise Stopped(signal.SIGTERM)


def in_its_own_process(function: Callable, *args):
    """What `function(*args)` returns or raises in a new process, which ends with this one. What it leaves in memory
    ends with it. Raises `BrokenProcessPool` where something ends it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with, (os.getpid(),)) as process:
        return process.submit(function, *args).result()
