"""What sampling alone would have missed of a run's peak, at several intervals.

    python -m experiments.evidence.sampler_check [--device cuda] [--arm shared] [--scale seed] [--k 4] [--repeats 3]

The same run at each interval, alternating. A run's record says by how much the highest sample lies below the peak that
torch (CUDA) or the kernel (CPU, resident memory) counted, and how often the sampler really sampled. Writes one row a
run to results/<machine>/sampler.csv. Runs that this commit has made with the same settings are not repeated. Exit
code 5: --minutes were over before the last run.
"""

import sys
import tempfile
import time
from pathlib import Path

from experiments import config as cfg
from experiments.config import RunConfig
from experiments.evidence.common import EXIT_TIME, FACTS, Parser, Table, minutes, numbers, place, whole
from experiments.suite import run_one
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.run_record import main_peak

COLUMNS = (
    "interval_s", "repeat", "achieved_interval_s", "longest_gap_s", "missed_bytes", "peak_bytes", "arm", "scale", "k",
    "threads", *FACTS,
)  # fmt: skip


def run(argv: list[str] | None) -> int:
    parser = Parser("sampler_check", __doc__)
    parser.add_argument("--arm", default="shared")
    parser.add_argument("--scale", help="default: seed on CUDA, cpu elsewhere")
    parser.add_argument("--k", type=whole(2), default=4)
    parser.add_argument("--intervals", default="0.01,0.05,0.1", help="seconds")
    parser.add_argument("--repeats", type=whole(1, 100), default=3)
    parser.add_argument("--threads", type=whole(1))
    parser.add_argument(
        "--minutes", type=minutes, default=10**6, help="begin no run after that; the same command goes on"
    )
    args = parser.parse_args(argv)
    deadline, took = time.monotonic() + 60 * args.minutes, 0.0
    intervals = numbers("--intervals", args.intervals)
    here = place(args, "peft", "psutil", "pynvml")
    scale = args.scale or cfg.default_scale(here.device)
    plan = [
        cfg.resolve(args.arm, args.k, scale, here.device, repeat, interval=interval, threads=args.threads)
        for repeat in range(args.repeats)
        for interval in intervals
    ]
    settings = {"arm": args.arm, "scale": scale, "k": args.k, "threads": plan[0].threads}
    table = Table(here.folder / "sampler.csv", COLUMNS, {**settings, **here.facts}, args.fresh)
    for config in plan:
        title = f"{config.interval * 1000:.0f} ms, {config.repeat + 1} of {args.repeats}"
        if table.has(interval_s=config.interval, repeat=config.repeat):
            print(f"{title}: already there", flush=True)
            continue
        if time.monotonic() + took > deadline:
            print(f"{title}: not begun after --minutes {args.minutes:g}; the same command goes on from here")
            return EXIT_TIME
        begun = time.monotonic()
        row = measure(config)
        took = max(took, time.monotonic() - begun)
        table.add({"interval_s": config.interval, "repeat": config.repeat, **row})
        print(
            f"{title}: every {row['achieved_interval_s'] * 1000:.1f} ms, longest gap "
            f"{row['longest_gap_s'] * 1000:.0f} ms, missed {row['missed_bytes'] / 2**20:.1f} "
            f"of {row['peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    table.finish()
    return 0


def measure(config: RunConfig) -> dict:
    """One run in a folder of its own: seconds and bytes. Raises `ConfigError` where it fails or nobody sampled."""
    with tempfile.TemporaryDirectory() as results:
        record = run_one(config, Path(results, "here"))
    sampler = record["sampler"] or {"lost_after_s": 0}
    if record["status"] != "ok" or "lost_after_s" in sampler:
        why = "its sampler was lost" if record["status"] == "ok" else record["error"] or record["status"]
        raise ConfigError(f"{config.run_id} every {config.interval} s failed: {why}; try it with experiments.train")
    return {
        "achieved_interval_s": sampler["achieved_interval_s"],
        "longest_gap_s": sampler["longest_gap_s"],
        "missed_bytes": sampler["peak_missed_bytes"],
        "peak_bytes": main_peak(record)[0],
    }


def main(argv: list[str] | None = None) -> int:
    return exit_code("sampler_check", run, argv)


if __name__ == "__main__":
    sys.exit(main())
