"""What reaches the terminal: one line that changes while a run goes on, and nothing of what libraries print."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator


class Live:
    """Lines on this process's standard output. It goes on where the reader is gone or the disk is full."""

    def __init__(self, pause: float):
        """`pause` is how many seconds of silence come at least before a `show` where the output is no terminal."""
        self.output = os.dup(1)  # stays the terminal while 1 is a run's log
        self.terminal = os.isatty(self.output)
        self.pause, self.last = pause, time.monotonic()

    def show(self, text: str) -> None:
        """The state of things: it replaces the one before on a terminal, and is left out elsewhere if too early."""
        if self.terminal:
            self._write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        elif time.monotonic() - self.last >= self.pause:
            self.last = time.monotonic()
            self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.last = time.monotonic()
        self._write(f"\r\x1b[K{text}\n" if self.terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.output, text.encode(sys.stdout.encoding or "utf-8", "replace"))


@contextlib.contextmanager
def output_to(log) -> Iterator[None]:
    """Everything that libraries print, also from C, goes to the open file `log`."""
    _flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        _flush()
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # the log's disk is full: what it could not take must not come out on the terminal
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            stream.flush()
