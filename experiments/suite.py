"""Arms x k x repeats, each run its own process, in alternating order; continues after a failure; can be resumed.

python -m experiments.suite --arms classic-baseline,classic-lean --k 2,4,8 --repeats 3

Exit codes: 0 every run finished or was already there (out of memory is a finished run), 1 some failed or were refused,
2 the plan cannot work, 5 some were left for later by --minutes, 130 or 143 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from experiments import config as cfg
from experiments.arms import ARMS
from experiments.commit import source_commit
from experiments.config import ROOT, SCALES, RunConfig
from experiments.measuring import is_committed
from experiments.processes import Launch, end_group, end_with_script, new_token, stoppable
from experiments.record import export, make_writable, new_record, no_room, outcome
from experiments.run_device import pick_device
from experiments.run_options import OPTIONS, Parser, add_minutes, add_options, add_place, number, overrides, whole
from experiments.run_record import FINISHED, RUNS, main_peak, read_record
from experiments.terminal import Live
from rloo_memory.device import machine_name, tells_of_memory
from rloo_memory.errors import EXIT_TIME, EXIT_USAGE, ConfigError, Stopped, exit_code
from rloo_memory.folder_lock import owned
from rloo_memory.sizes import GIB
from rloo_memory.storage import write_json

PATIENCE = 30.0  # seconds that a run which is told to stop has to write its record


def main(argv: list[str] | None = None) -> int:
    with stoppable():
        end_with_script()
        return exit_code("suite", run, argv)


def run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.suite", description=__doc__.split("\n")[0])
    parser.add_argument("--arms", required=True, help=f"comma-separated, of: {', '.join(ARMS)}")
    parser.add_argument("--k", default="2,4,8", help="comma-separated completions per prompt")
    parser.add_argument("--repeats", type=whole, default=1)
    parser.add_argument("--scale", help=f"{', '.join(SCALES)}; default: seed on CUDA, cpu elsewhere")
    add_place(parser)
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are already finished")
    parser.add_argument("--timeout", type=number, default=3600, help="seconds after which one run is stopped")
    add_minutes(parser)
    parser.add_argument("--print-folder", action="store_true", help="print where the runs would go, and run nothing")
    add_options(parser, OPTIONS)
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
    cfg.check_limit("timeout", args.timeout, 1, 10**7)
    try:
        ks = [whole(k) for k in args.k.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--k: {error}, several like 2,4,8") from None
    arms = args.arms.split(",")
    for option, chosen in (("--arms", arms), ("--k", ks)):
        if twice := [value for value in chosen if chosen.count(value) > 1]:
            raise ConfigError(f"{option} names {twice[0]} more than once; for repeated runs use --repeats")
    device_kind, device_name, _ = pick_device(args.device)
    scale = cfg.default_scale(device_kind) if args.scale is None else args.scale
    given = overrides(args, OPTIONS)
    plan = [
        cfg.resolve(arm, k, scale, device_kind, repeat=repeat, **given)
        for repeat in range(args.repeats)
        for k in ks
        for arm in arms
    ]
    name = machine_name(device_kind, device_name) if args.machine is None else args.machine
    return plan, cfg.machine_folder(args.results, name)


def run_plan(plan: list[RunConfig], machine: Path, fresh: bool, timeout: float, minutes: float) -> int:
    """Run what is not there yet, tell how each ended, and show the peaks. Returns the exit code."""
    live, commit, begun = Live(pause=60), source_commit(), time.monotonic()
    seconds = earlier_seconds(plan, machine)
    told: dict[RunConfig, str] = {}  # why a run has no figure
    launches: dict[RunConfig, str] = {}
    failed, late, stop = 0, False, None

    def there(config: RunConfig) -> bool:
        record = read_record(machine / config.run_id)
        return not fresh and record is not None and is_same(record, config, commit)

    missing = [config for config in plan if not there(config)]
    live.say(
        f"{len(plan)} run(s), {len(plan) - len(missing)} already there"
        + (f", about {expected(missing, seconds)} for the rest" if missing and seconds else "")
    )
    try:
        for place, config in enumerate(plan, 1):
            if config not in missing or there(config):  # another suite may have run it meanwhile
                continue
            title = f"[{place}/{len(plan)}] {config.arm} k={config.k} repeat {config.repeat}"
            if time.monotonic() - begun >= 60 * minutes:
                live.say(f"{title}: not begun after --minutes {minutes:g}; the same command goes on from here")
                late = True
                break
            rest = [config for config in plan[place - 1 :] if config in missing]
            left = f", about {expected(rest, seconds)} left" if seconds else ""
            live.say(f"{title}: running, {clock(time.monotonic() - begun)} elapsed{left}")
            started, launches[config] = time.monotonic(), new_token()
            try:
                record = run_one(config, machine, timeout, launches[config], lambda text: live.show(f"  {text}"))
            except (ConfigError, OSError) as refusal:  # OSError: the system has no process or no file to give
                told[config], failed = "refused", failed + 1
                live.say(f"  REFUSED: {refusal}")
                continue
            except KeyboardInterrupt:
                told[config] = "stopped"
                raise
            took = time.monotonic() - started
            if record["status"] in FINISHED:
                seconds.setdefault(cell(config), []).append(took)
            else:
                told[config], failed = "error", failed + 1
            live.say(f"  {outcome(record)}, {took:.0f} s")
    except KeyboardInterrupt as signaled:
        stop = Stopped.number(signaled)
    try:
        export(machine)
    except OSError as error:
        live.say(no_room(error, machine / RUNS))
        failed += 1
    figures = {}
    for config in plan:
        record, token = read_record(machine / config.run_id), launches.get(config)
        if config in told:
            figures[config] = told[config]
        elif token is None:  # only what was there before and is this very run
            figures[config] = figure(record) if there(config) else "not begun"
        else:
            figures[config] = figure(record) if record and record.get("launch") == token else "gone"
    live.say("\n" + "\n".join(table(figures)))
    if failed:
        live.say(f"{failed} failure(s); a run that failed says why in its log.txt")
    if stop:
        live.say(f"stopped by {stop.name}; the same command goes on from here")
        return 128 + stop
    return 1 if failed else EXIT_TIME if late else 0


def run_one(
    config: RunConfig,
    machine: Path,
    timeout: float | None = None,
    token: str | None = None,
    show=lambda text: None,
) -> dict:
    """One run in its own process, below `machine` (results/<machine>). Returns its record, which is of this launch.

    `show` is told now and then how far it is. Raises `ConfigError` with the run's own words where it was refused, and
    passes `KeyboardInterrupt` on when the run has written its record.
    """
    machine = machine.absolute()
    token = token or new_token()
    command = [sys.executable, "-m", "experiments.train", "--config"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as launch, tempfile.TemporaryFile() as words:  # no name: a kill leaves nothing
        handed_over = f"/dev/fd/{launch.fileno()}"
        Launch(config, machine, token, os.getpid()).write(Path(handed_over))
        launch.seek(0)
        process = subprocess.Popen(
            [*command, handed_over],
            pass_fds=[launch.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            start_new_session=True,  # a Ctrl-C in the terminal is for the suite, which passes it on once
        )
        stopped, late = None, False
        try:
            late = not follow(process, timeout, show)
        except KeyboardInterrupt as stop:
            stopped = stop
            show("stopping, its record is being written")
        end(process, Stopped.number(stopped) if stopped else signal.SIGTERM)
        words.seek(0)
        said = words.read().decode(errors="replace").strip().splitlines()
    reason = f"stopped after --timeout {timeout:g} s" if late else None
    try:
        return settle_record(config, machine, token, process.returncode, said, reason)
    finally:
        if stopped:
            raise stopped


def follow(process: subprocess.Popen, timeout: float | None, show) -> bool:
    """Tell `show` the run's last line and its time, twice a second, until it ends. Whether it did in time."""
    begun, text = time.monotonic(), "starting"
    while timeout is None or time.monotonic() - begun < timeout:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
            return True
        while select.select([process.stdout], [], [], 0)[0]:
            said = os.read(process.stdout.fileno(), 2**16)
            text = next((line.strip() for line in reversed(said.decode().split("\n")) if line.strip()), text)
            if not said:  # closed
                break
        show(f"{text}, {clock(time.monotonic() - begun)}")
    return False


def end(process: subprocess.Popen, number: int) -> None:
    """End a run that may still go on, and whatever it started that does not end with it."""
    end_group(process, number, PATIENCE)
    process.wait()
    process.stdout.close()


def settle_record(
    config: RunConfig, machine: Path, token: str, returncode: int, said: list[str], reason: str | None = None
) -> dict:
    """The record of this launch. Where the process died before it could write the end, say so in its place.

    `said` is what it left on stderr, `reason` why it was made to stop. Native code that cannot allocate may abort the
    process: then the log's last lines tell that memory ran out. Raises `ConfigError` where the run was refused.
    """
    folder = machine / config.run_id
    record = read_record(folder)
    mine = record is not None and record.get("launch") == token
    if not mine and returncode == EXIT_USAGE:
        raise ConfigError(said[-1].removeprefix("train: ") if said else "no reason was given")
    if mine and (record["status"] in FINISHED or record["status"] == "error" and not reason):
        return record
    died = f"ended by {signal.Signals(-returncode).name if returncode < 0 else f'exit code {returncode}'}"
    if mine:
        record.update(status="error", exit_code=returncode, error=reason or f"{died} before it could report")
        with contextlib.suppress(OSError):
            last_words = (folder / "log.txt").read_bytes()[-2000:].decode(errors="replace")
            if returncode == -signal.SIGABRT and tells_of_memory(last_words):
                record["status"] = "oom"
    else:
        error = reason or (said[-1].removeprefix("train: ") if said else f"{died} before it began")
        ended = dict(status="error", error=error, exit_code=returncode)
        record = vars(new_record(config, source_commit(), **ended, device_kind=config.device, launch=token))
    try:
        with owned(folder, patience=0):
            write_json(folder / "run.json", record)
            for name in () if mine else ("memory.csv", "phases.csv", "log.txt"):  # an older run's
                (folder / name).unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        record["error"] += f"; not recorded: {error}"
    return record


def is_same(record: dict, config: RunConfig, commit: str) -> bool:
    """Whether the finished run was this configuration on this very code. Changed, uncommitted code never is."""
    return (
        record["status"] in FINISHED
        and record["config"] == config.as_dict()
        and record["commit"] == commit
        and is_committed(commit)
    )


def cell(config: RunConfig) -> RunConfig:
    """What all repeats of a run have in common."""
    return replace(config, repeat=0, seed=0)


def earlier_seconds(plan: list[RunConfig], machine: Path) -> dict[RunConfig, list[float]]:
    """How long finished runs of the planned cells took on this machine, from their records."""
    wanted, seconds = {cell(config) for config in plan}, {}
    for path in sorted(machine.glob("*/run.json")):
        record = read_record(path.parent)
        with contextlib.suppress(ConfigError, TypeError, ValueError, KeyError):
            if record and record["status"] in FINISHED:
                key = cell(RunConfig.from_dict(record["config"]))
                span = datetime.fromisoformat(record["finished_at"]) - datetime.fromisoformat(record["started_at"])
                if key in wanted and span.total_seconds() > 0:
                    seconds.setdefault(key, []).append(span.total_seconds())
    return seconds


def expected(left: list[RunConfig], seconds: dict[RunConfig, list[float]]) -> str:
    """From finished runs: the same cell's time if known, else the mean of all known, scaled by k."""
    per_k = statistics.fmean(statistics.fmean(times) / key.k for key, times in seconds.items())
    times = (seconds.get(cell(config)) for config in left)
    return clock(sum(statistics.fmean(t) if t else per_k * c.k for c, t in zip(left, times, strict=True)))


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def figure(record: dict) -> str:
    """What the table says of a run: its peak above the start level in GiB, or a word."""
    if record["status"] != "ok":
        return {"oom": "OOM"}.get(record["status"], "error")
    return f"{main_peak(record)[1] / GIB:.2f}"


def table(figures: dict[RunConfig, str]) -> list[str]:
    """Peak above the start level, GiB, one row an arm, one column a k, repeats separated by a slash."""
    ks = sorted({config.k for config in figures})
    rows = [["peak above start, GiB", *(f"k={k}" for k in ks)]]
    for arm in dict.fromkeys(config.arm for config in figures):
        cells = [[text for c, text in figures.items() if (c.arm, c.k) == (arm, k)] for k in ks]
        rows.append([arm, *(texts[0] if set(texts) == {"not begun"} else "/".join(texts) for texts in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{row[0]:{widths[0]}}" + "".join(f"  {text:>{w}}" for text, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
