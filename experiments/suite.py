"""Arms x k x repeats, each run its own process, in alternating order; continues after a failure; can be resumed.

python -m experiments.suite --arms classic-baseline,classic-lean --k 2,4,8 --repeats 3

Exit codes: 0 every run finished or was already there (out of memory is a finished run), 1 some failed or were refused,
2 the plan cannot work, 5 some were left for later by --minutes, 130 or 143 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas

from experiments import config as cfg
from experiments.arms import ARMS
from experiments.commit import is_same_code, source_commit
from experiments.config import ROOT, RunConfig
from experiments.processes import end_with, stoppable
from experiments.record import export, make_writable, new_record, write_record
from experiments.run_device import machine_folder, pick_device
from experiments.run_options import Parser, add_settings, as_words, settings, whole
from experiments.run_record import FINISHED, RunRecord, main_peak, read_record
from rloo_memory.device import tells_of_memory
from rloo_memory.errors import EXIT_TIME, EXIT_USAGE, ConfigError, Stopped, program
from rloo_memory.sizes import GIB

PATIENCE = 30.0  # seconds that a run which is told to stop has to write its record
LISTED = ("arm", "k", "repeat", "seed")  # settings that each run of a plan has of its own


@stoppable()
@program("suite")
def main(argv: list[str] | None) -> int:
    if script := os.environ.pop("SCRIPT_PID", None):  # of the script that started it
        end_with(int(script))
    parser = Parser("suite", __doc__)
    parser.add_argument("--arms", required=True, help=f"comma-separated, of: {', '.join(ARMS)}")
    parser.add_argument("--k", default="2,4,8", help="comma-separated completions per prompt")
    parser.add_argument("--repeats", type=whole, default=1)
    parser.add_fresh()
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which one run is stopped")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing after that; the same command goes on later"
    )
    parser.add_argument("--print-folder", action="store_true", help="print where the runs would go, and run nothing")
    add_settings(parser, leave_out=LISTED)
    args = parser.parse_args(argv)
    plan, machine = make_plan(args)
    if args.print_folder:
        print(machine)
        return 0
    make_writable(machine)
    return run_plan(plan, machine, args.fresh, args.timeout, args.minutes)


def make_plan(args: argparse.Namespace) -> tuple[list[RunConfig], Path]:
    """Every run's configuration, checked before the first one starts: repeats outermost, arms innermost, so that arms
    alternate and a drift of the machine touches all of them. Raises `ConfigError`."""
    cfg.check_limit("repeats", args.repeats, 1, 1000)
    try:
        ks = list(dict.fromkeys(whole(k) for k in args.k.split(",")))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--k: {error}, several like 2,4,8") from None
    arms = list(dict.fromkeys(args.arms.split(",")))
    kind, device_name = pick_device(args.device)
    given = {name: getattr(args, name) for name in settings(LISTED)}
    plan = [
        cfg.resolve(arm, k, device=kind, repeat=repeat, **given)
        for repeat in range(args.repeats)
        for k in ks
        for arm in arms
    ]
    return plan, machine_folder(args, kind, device_name)


def run_plan(plan: list[RunConfig], machine: Path, fresh: bool, timeout: float, minutes: float) -> int:
    """Run what is not there yet, and show the peaks. Returns the exit code."""
    commit, begun, code = source_commit(), time.monotonic(), 0
    figures = dict.fromkeys(plan, "not begun")
    for config in plan:
        record = None if fresh else read_record(machine / config.run_id)
        if record and record["status"] in FINISHED and record["config"] == vars(config):
            if is_same_code(record["commit"], commit):
                figures[config] = figure(record)
    missing = [config for config in plan if figures[config] == "not begun"]
    say(f"{len(plan)} run(s), {len(plan) - len(missing)} already there")
    try:
        for done, config in enumerate(missing):
            elapsed = time.monotonic() - begun
            if elapsed >= 60 * minutes:
                say(f"{len(missing) - done} not begun after --minutes {minutes:g}; the same command goes on from here")
                code = code or EXIT_TIME
                break
            title = f"[{done + 1}/{len(missing)}] {config.arm} k={config.k} repeat {config.repeat}"
            say(title + left(missing, done, elapsed))
            figures[config] = "stopped"
            record = run_one(config, machine, timeout)
            figures[config] = figure(record)
            if record["status"] not in FINISHED:
                code = 1
    except KeyboardInterrupt as stop:
        code = 128 + Stopped.number(stop)
    export(machine)
    say("\n" + "\n".join(table(figures)))
    if code == 1:
        say("some runs failed; why is said above, and in the log.txt of each that began")
    if code > 128:
        say(f"stopped by {signal.Signals(code - 128).name}; the same command goes on from here")
    return code


def left(missing: list[RunConfig], done: int, elapsed: float) -> str:
    """About how long the rest takes, if a run's time grows with its completions."""
    before, behind = (sum(config.batch for config in part) for part in (missing[:done], missing[done:]))
    return f", about {elapsed / 60 * behind / before:.0f} minutes left" if done else ""


def run_one(config: RunConfig, machine: Path, timeout: float | None = None) -> dict:
    """One run in its own process, below `machine` (results/<machine>). Returns its record: never one of an older run.

    Where the process died before it could write the end, this does, and the samples stay. `KeyboardInterrupt` is
    passed on when the run has written its record.
    """
    machine = machine.absolute()
    command = [sys.executable, "-m", "experiments.train", *as_words(config), f"--results={machine.parent}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [*command, f"--machine={machine.name}"],
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=functools.partial(end_with, os.getpid()),
        stdin=subprocess.DEVNULL,
    )
    late = ""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        late = f"stopped after --timeout {timeout:g} s"
    finally:
        end(process)
    return settle_record(config, machine / config.run_id, process, late)


def end(process: subprocess.Popen) -> None:
    """Tell a run that may still go on to stop, and wait for its record."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def settle_record(config: RunConfig, folder: Path, process: subprocess.Popen, late: str) -> dict:
    """The record of the run that this process was. Native code that cannot allocate may abort the process: then the
    log's last lines tell that memory ran out."""
    record, code = read_record(folder), process.returncode
    died = f"ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    if record is None or record["pid"] != process.pid:
        error = "refused" if code == EXIT_USAGE else f"{died} before it began"
        say(f"  FAILED: {error}")
        return vars(new_record(config, source_commit(), status="error", error=error, exit_code=code))
    if record["status"] == "running" or late and record["status"] not in FINISHED:
        record |= dict(status="error", exit_code=code, error=late or f"{died} before it could report")
        with contextlib.suppress(FileNotFoundError):
            last_words = (folder / "log.txt").read_bytes()[-2000:].decode(errors="replace")
            if code == -signal.SIGABRT and tells_of_memory(last_words):
                record["status"] = "oom"
        say(f"  {'OUT OF MEMORY' if record['status'] == 'oom' else 'FAILED'}: {record['error']}")
        write_record(RunRecord(**record), folder)
    return record


def figure(record: dict) -> str:
    """What the table says of a run: its peak above the start level in GiB, or a word."""
    if record["status"] != "ok":
        return {"oom": "OOM"}.get(record["status"], "error")
    return f"{main_peak(record)[1] / GIB:.2f}"


def table(figures: dict[RunConfig, str]) -> list[str]:
    """Peak above the start level, GiB, one row an arm, one column a k, repeats separated by a slash."""
    cells = pandas.Series(figures.values(), [[config.arm for config in figures], [config.k for config in figures]])
    texts = cells.groupby(level=(0, 1)).agg(lambda each: each.iloc[0] if {*each} == {"not begun"} else "/".join(each))
    table = texts.unstack().reindex(cells.index.unique(0)).rename(columns=lambda k: f"k={k}")
    return table.rename_axis(columns="peak above start, GiB").to_string().splitlines()


def say(text: str) -> None:
    print(text, flush=True)  # in its place among what the runs say


if __name__ == "__main__":
    sys.exit(main())
