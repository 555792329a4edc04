"""Items of evidence in order of priority, within some minutes, resumed, each leaving what it finished."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.config import ROOT
from experiments.evidence.common import EXIT_TIME, EXIT_VERDICT
from experiments.processes import end_group, end_with
from rloo_memory.errors import Stopped
from rloo_memory.storage import read_json, write_json

DONE = ("done", "verdict")  # of a verdict: measured to the end, and not as it should be
MOST_FAILURES = 2
PACK_SECONDS = 20.0  # between archives while an item runs
END_SECONDS = 8.0  # kept for ending an item and packing


@dataclass(frozen=True)
class Item:
    """One piece of evidence: a command of this project, and how long it should take."""

    name: str
    command: tuple[str, ...]  # a module and its arguments
    expected_s: float  # a statement; what earlier runs took is known better
    least_s: float | None = None  # what is worth beginning with, of an item that takes --minutes; None: all of it
    last_s: float = 0.0  # what it may take beyond its minutes, to end what it began
    # Whether results/<machine> has all of it, where exit code 0 may not say
    complete: Callable[[Path], bool] | None = None

    @property
    def takes_minutes(self) -> bool:
        return self.least_s is not None


@dataclass(frozen=True)
class State:
    """What is known of an item: `done`, `verdict`, `stopped` (time was up), `failed`, `late` (over its own limit)."""

    state: str
    commit: str
    command: tuple[str, ...]
    exit_code: int | None = None
    seconds: float = 0.0  # of all its attempts
    failures: int = 0


class Session:
    """Runs items until the time is up. `said` gets a line for each; `pack` is called when there is more to keep."""

    def __init__(self, folder: Path, commit: str, minutes: float, environment: dict[str, str], said, pack):
        """`folder` is results/<machine>, `environment` that of the items' processes."""
        self.folder, self.commit, self.environment, self.said, self.pack = folder, commit, environment, said, pack
        self.deadline = time.monotonic() + 60 * minutes
        self.path = folder / "on_gpu" / "items.json"
        self.states = {name: State(**fields) for name, fields in (read_json(self.path) or {}).items()}

    def left(self) -> float:
        """Seconds that an item may still take."""
        return self.deadline - time.monotonic() - END_SECONDS

    def known(self, item: Item) -> State | None:
        """What this very code, asked for the same, left of the item."""
        state = self.states.get(item.name)
        same = state and state.commit == self.commit and tuple(state.command) == item.command
        return state if same and not self.commit.endswith("-dirty") and self.commit != "unknown" else None

    def expected(self, item: Item) -> float:
        """Seconds: what it took when it was finished once, else what was stated."""
        state = self.states.get(item.name)
        return state.seconds if state and state.state in DONE else item.expected_s

    def run(self, items: list[Item]) -> list[str]:
        """Begins whatever is not done and fits, those that failed before last, and then what was stopped once more.
        Returns the names of those that failed now."""
        failed = self.run_once(items)
        stopped = [item for item in items if item.name in self.states and self.states[item.name].state == "stopped"]
        return failed + (self.run_once(stopped) if stopped else [])

    def run_once(self, items: list[Item]) -> list[str]:
        failed = []
        for item in sorted(items, key=self.failures):
            known = self.known(item)
            if known and known.state in DONE:
                self.said(f"{item.name}: there ({known.state}, {known.seconds:.0f} s)")
                continue
            if known and known.failures >= MOST_FAILURES:
                self.said(f"{item.name}: failed {known.failures} times, left alone (--again {item.name} tries it)")
                continue
            needs = item.least_s if item.takes_minutes else self.expected(item)
            if needs > self.left():
                self.said(f"{item.name}: not begun, takes {needs:.0f} s and {max(0, self.left()):.0f} s are left")
                continue
            state = self.run_one(item)
            failed += [item.name] * (state.state in ("failed", "late"))
        return failed

    def failures(self, item: Item) -> int:
        known = self.known(item)
        return known.failures if known else 0

    def run_one(self, item: Item) -> State:
        """The item in its own process, ended when its time is up. Its output goes to on_gpu/<item>.log."""
        begun, known = time.monotonic(), self.known(item)
        before = known or State("stopped", self.commit, item.command)
        limit = min(self.left(), max(4 * self.expected(item), self.expected(item) + 120))
        at_deadline = limit >= self.left()
        self.said(f"{item.name}: begins, about {self.expected(item):.0f} s, {self.left():.0f} s are left")
        place = ("--results", str(self.folder.parent), "--machine", self.folder.name)
        command = [sys.executable, "-m", *item.command, *place]
        if item.takes_minutes:
            command += ["--minutes", f"{max(0.0, min(limit, self.left()) - 5 - item.last_s) / 60:.3f}"]
        log = self.folder / "on_gpu" / f"{item.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        here = os.getpid()
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with(here),
            )
            try:
                in_time = self.follow(process, begun + limit)
            except KeyboardInterrupt as stop:
                self.end(process)
                self.keep(item, replace(before, state="stopped", seconds=before.seconds + time.monotonic() - begun))
                raise Stopped(Stopped.number(stop)) from None
            self.end(process)
        code = process.returncode if in_time else None
        state = self.verdict(item, code, at_deadline)
        failures = before.failures + (state in ("failed", "late"))
        seconds = round(before.seconds + time.monotonic() - begun, 1)
        after = replace(before, state=state, exit_code=code, seconds=seconds, failures=failures)
        self.keep(item, after)
        self.said(
            f"{item.name}: {state}, {time.monotonic() - begun:.0f} s{last_words(log) if state != 'done' else ''}"
        )
        return after

    def verdict(self, item: Item, code: int | None, at_deadline: bool) -> str:
        if code is None:
            return "stopped" if at_deadline else "late"
        if code == EXIT_TIME or code == 0 and item.complete is not None and not item.complete(self.folder):
            return "stopped"
        return {0: "done", EXIT_VERDICT: "verdict"}.get(code, "failed")

    def follow(self, process: subprocess.Popen, until: float) -> bool:
        """Whether it ended in time. Meanwhile what it has finished is packed."""
        packed = time.monotonic()
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(1.0, max(0.0, until - time.monotonic())))
                return True
            if time.monotonic() - packed > PACK_SECONDS:
                self.pack()
                packed = time.monotonic()
        return process.poll() is not None

    def end(self, process: subprocess.Popen) -> None:
        """Some seconds to write a record, and no wait for what a driver does not let go."""
        end_group(process, signal.SIGTERM, patience=4.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)

    def keep(self, item: Item, state: State) -> None:
        self.states[item.name] = state
        write_json(self.path, {name: asdict(state) for name, state in self.states.items()})
        self.pack()


def last_words(log: Path) -> str:
    """The last line of a log, as an addition to what is said of an item."""
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
