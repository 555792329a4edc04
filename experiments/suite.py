"""Arms x k x repeats, each run its own process, in alternating order; continues after a failure; can be resumed.

python -m experiments.suite --arms classic-baseline,classic-lean --k 2,4,8 --repeats 3
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments import config as cfg
from experiments.config import ARMS, EXIT_USAGE, GIB, ROOT, SCALES, ConfigError, RunConfig
from experiments.device import pick_device, tells_of_memory
from experiments.record import (
    FINISHED,
    main_peak,
    make_writable,
    read_record,
    source_commit,
    write_json,
    write_summary,
)

PASSED_ON = {
    "model": str, "documents": str, "budget": str, "steps": int, "interval": float, "precision": str, "threads": int,
    "batch": int, "completions_per_forward": int,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.suite", description=__doc__.split("\n")[0])
    parser.add_argument("--arms", required=True, help=f"comma-separated, of: {', '.join(ARMS)}")
    parser.add_argument("--k", default="2,4,8", help="comma-separated completions per prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", help=f"{', '.join(SCALES)}; default: seed on CUDA, cpu elsewhere")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--machine", help="folder name below --results")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are already finished")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which one run is stopped")
    parser.add_argument("--minutes", type=float, help="begin no run after that; the same command goes on later")
    for name, kind in PASSED_ON.items():
        parser.add_argument(option(name), type=kind, help="as for experiments.train")
    args = parser.parse_args(argv)
    try:
        plan, machine = make_plan(args)
        make_writable(machine)
    except ConfigError as error:
        print(f"suite: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_plan(plan, machine, args)


def make_plan(args: argparse.Namespace) -> tuple[list[RunConfig], Path]:
    """Every run's configuration, checked before the first one starts: repeats outermost, arms innermost, so that arms
    alternate and a drift of the machine touches all of them. Raises `ConfigError`."""
    device_kind, device_name, _ = pick_device(args.device)
    scale = args.scale or cfg.default_scale(device_kind)
    try:
        ks = [int(k) for k in args.k.split(",")]
    except ValueError:
        raise ConfigError(f"--k {args.k!r} is not a comma-separated list of numbers; write it like 2,4,8") from None
    if args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}; it must be at least 1")
    overrides = {
        "budget_bytes": cfg.parse_bytes(args.budget) if args.budget else None,
        **{name: getattr(args, name) for name in PASSED_ON if name != "budget"},
    }
    plan = [
        cfg.resolve(arm, k, scale, device_kind, repeat=repeat, **overrides)
        for repeat in range(args.repeats)
        for k in ks
        for arm in args.arms.split(",")
    ]
    return plan, args.results / (args.machine or cfg.machine_name(device_kind, device_name))


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_plan(plan: list[RunConfig], machine: Path, args: argparse.Namespace) -> int:
    commit = source_commit()
    durations: dict[tuple, list[float]] = {}
    begun = time.time()
    failed = 0
    for number, config in enumerate(plan, 1):
        folder = machine / config.run_id
        title = f"[{number}/{len(plan)}] {config.arm} k={config.k} repeat {config.repeat}"
        record = read_record(folder)
        if record and not args.fresh and is_same(record, config, commit):
            print(f"{title}: already there, {outcome(record)}", flush=True)
            continue
        if args.minutes is not None and time.time() - begun > 60 * args.minutes:
            print(f"{title}: not begun after --minutes {args.minutes:g}; the same command goes on from here")
            break
        left = expected_seconds(plan[number - 1 :], durations)
        print(f"{title}: running, {clock(time.time() - begun)} elapsed, about {left} left", flush=True)
        started = time.time()
        returncode = run_one(config, machine, args)
        seconds = time.time() - started
        durations.setdefault((config.arm, config.k), []).append(seconds)
        record = settle_record(folder, returncode)
        if record is None:  # refused before anything was written
            return returncode
        failed += record["status"] == "error"
        print(f"{' ' * len(title)}  {outcome(record)}, {seconds:.0f} s", flush=True)
        write_summary(machine)
    write_summary(machine)
    print_table(plan, machine)
    if failed:
        print(f"{failed} run(s) failed; their log.txt says why")
    return 1 if failed else 0


def run_one(config: RunConfig, machine: Path, args: argparse.Namespace) -> int:
    """One run in its own process; its terminal lines are kept out of the suite's. Returns the exit code."""
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        "--arm",
        config.arm,
        "--k",
        str(config.k),
        "--scale",
        config.scale,
        "--repeat",
        str(config.repeat),
        "--device",
        config.device,
        "--results",
        str(machine.parent),
        "--machine",
        machine.name,
    ]
    for name in PASSED_ON:
        if getattr(args, name) is not None:
            command += [option(name), str(getattr(args, name))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        return process.wait(args.timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"  stopped after --timeout {args.timeout:.0f} s", flush=True)
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(10)
        raise


def settle_record(folder: Path, returncode: int) -> dict | None:
    """The run's record; where the process died before it could write the end, say so in its place.

    Native code that cannot allocate may abort the process: then the log's last lines tell that memory ran out.
    """
    record = read_record(folder)
    if record is not None and record["status"] == "running":
        name = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        log = folder / "log.txt"
        oom = returncode == -signal.SIGABRT and log.exists() and tells_of_memory(log.read_text()[-2000:])
        status = "oom" if oom else "error"
        record.update(status=status, exit_code=returncode, error=f"ended by {name} before it could report")
        write_json(folder / "run.json", record)
    return record


def is_same(record: dict, config: RunConfig, commit: str) -> bool:
    """Whether the finished run was this configuration on this very code. Changed, uncommitted code never is."""
    return (
        record["status"] in FINISHED
        and record["config"] == config.as_dict()
        and record["commit"] == commit
        and not commit.endswith("-dirty")
        and commit != "unknown"
    )


def outcome(record: dict) -> str:
    if record["status"] == "oom":
        return "OUT OF MEMORY"
    if record["status"] != "ok":
        return f"FAILED: {record['error']}"
    peak, above = (size / GIB for size in main_peak(record))
    return f"peak {peak:.2f} GiB, {above:.2f} above start, {record['prompt_tokens_fed_mean']:.0f} prompt tokens"


def expected_seconds(left: list[RunConfig], durations: dict) -> str:
    """From the finished runs: the same cell's time if known, else the arm's, else the mean of all, scaled by k."""
    if not durations:
        return "?"
    per_k = sum(sum(times) / k for (_, k), times in durations.items()) / sum(len(t) for t in durations.values())
    total = 0.0
    for config in left:
        times = durations.get((config.arm, config.k))
        total += sum(times) / len(times) if times else per_k * config.k
    return clock(total)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def print_table(plan: list[RunConfig], machine: Path) -> None:
    """Peak above the start level, GiB, one row an arm, one column a k, repeats separated by a slash."""
    ks = sorted({config.k for config in plan})
    print(f"\npeak above start, GiB{'':5}" + "".join(f"{f'k={k}':>18}" for k in ks))
    for arm in dict.fromkeys(config.arm for config in plan):
        cells = []
        for k in ks:
            runs = [read_record(machine / c.run_id) for c in plan if c.arm == arm and c.k == k]
            cells.append("/".join(short(run) for run in runs if run))
        print(f"{arm:26}" + "".join(f"{cell:>18}" for cell in cells))


def short(record: dict) -> str:
    if record["status"] != "ok":
        return {"oom": "OOM"}.get(record["status"], "error")
    return f"{main_peak(record)[1] / GIB:.2f}"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
