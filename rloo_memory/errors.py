"""What ends a command: a setting that cannot work, or a signal; each in one line with an exit code."""

import atexit
import difflib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


class ConfigError(ValueError):
    """A setting that cannot work. Its text is one line: the value, the limit, the remedy."""


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end; `args[0]` is its number. Ctrl-C without a handler of ours has none."""

    @staticmethod
    def number(stop: KeyboardInterrupt) -> signal.Signals:
        return signal.Signals(stop.args[0] if stop.args else signal.SIGINT)


EXIT_USAGE = 2  # a setting that cannot work
EXIT_TIME = 5  # what fitted into --minutes is done; the same command goes on from there


def read_by_nobody(stream) -> None:
    """What is written to it from now on is lost, where its reader has gone and each write would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def exit_code(program: str, run, args) -> int:
    """What `run(args)` returns; `EXIT_USAGE` with one line on stderr where it raises `ConfigError`; 128 + the signal's
    number, also with one line, where Ctrl-C or a signal that raises `Stopped` ends it, and without where nobody reads
    what it prints."""
    try:
        return run(args)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # whoever read what is printed has gone, as `head` does
        read_by_nobody(sys.stdout)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as stop:
        print(f"{program}: stopped by {Stopped.number(stop).name}", file=sys.stderr)
        return 128 + Stopped.number(stop)


def program(name: str):
    """Decorates a program's `main`, which gets its words, or None for those of the command line, and returns the exit
    code: with the answers of `exit_code`."""

    def decorated(main):
        @functools.wraps(main)
        def answered(argv: list[str] | None = None) -> int:
            return exit_code(name, main, argv)

        return answered

    return decorated


def leave(code: int) -> NoReturn:
    """End one of several processes with `code`: it does what an exit does, except taking the interpreter down.

    gloo's workers need the interpreter's lock to give back the tensors of an exchange that is over, and a group can
    outlive `destroy_process_group`: torch keeps FSDP's meshes. Until 3.14, Python ends a thread that asks for the lock
    of an interpreter being taken down, and the C++ below the thread then aborts the process.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, each once: a chain can be a ring."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def shown(value) -> str:
    """A value as a message shows it: quoted if it is text, and never long."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:60]}... ({len(text)} characters)"


def choose(kind: str, name: str, choices) -> str:
    """`name`, which must be one of `choices`. Raises `ConfigError`."""
    if name not in choices:
        named = ", ".join(choices)
        if len(named) > 600:
            named = f"{', '.join(difflib.get_close_matches(name, choices, n=10, cutoff=0))} ({len(choices)} in all)"
        raise ConfigError(f"unknown {kind} {shown(name)}; choose one of: {named}")
    return name
