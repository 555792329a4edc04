"""How a run's process is handed its work, ends with the one that started it, and owns its folder."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.config import RunConfig
from rloo_memory.errors import ConfigError, Stopped, shown

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Launch:
    """A run as one process hands it to another: what to run, where its folder goes, and how both know each other."""

    config: RunConfig
    machine: Path  # results/<machine>, absolute
    token: str  # written into run.json: a record with another one is of another launch
    parent: int | None = None  # process id; when that process ends, so does the run

    def write(self, path: Path) -> None:
        fields = {**vars(self), "config": self.config.as_dict(), "machine": str(self.machine)}
        path.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Launch":
        """What `write` wrote. Raises `ConfigError` naming the file."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            launch = cls(**{**fields, "machine": Path(fields["machine"])})
            if not isinstance(launch.token, str) or type(launch.parent) not in (int, type(None)):
                raise TypeError
            return cls(RunConfig.from_dict(launch.config), launch.machine.absolute(), launch.token, launch.parent)
        except OSError as error:
            raise ConfigError(f"cannot read --config {shown(str(path))}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(f"--config {shown(str(path))}: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"--config {shown(str(path))} holds no run; leave the option out and name --arm and --k"
            ) from None


def new_token() -> str:
    """What tells one launch from another."""
    return uuid.uuid4().hex[:16]


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
    """Let the kernel send this process SIGTERM when process `parent`, which started it, ends for whatever reason."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that
        raise Stopped(signal.SIGTERM)


def end_with_script() -> None:
    """End when the script does that started this process and says so in SCRIPT_PID: one that is killed hands no signal
    on."""
    if script := os.environ.pop("SCRIPT_PID", None):
        end_with(int(script))


def end_group(process: subprocess.Popen, number: int, patience: float) -> None:
    """Tell the leader of a group to end, and after `patience` seconds kill it and whatever it started."""
    if process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
