"""What sampling alone would have missed of a run's peak, at several intervals.

    python -m experiments.evidence.sampler_check [--device cuda] [--arm shared] [--scale seed] [--k 4] [--repeats 3]

The same run at each interval, alternating. A run's record says by how much the highest sample lies below the peak that
torch (CUDA) or the kernel (CPU, resident memory) counted, and how often the sampler really sampled. Writes one row a
run to results/<machine>/sampler.csv.
"""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

from experiments import config as cfg
from experiments.config import ROOT, ConfigError
from experiments.device import pick_device
from experiments.record import main_peak
from experiments.suite import run_one

COLUMNS = (
    "interval_s", "repeat", "achieved_interval_s", "longest_gap_s", "missed_bytes", "peak_bytes", "arm", "scale", "k",
    "device_kind", "device_name", "torch_version", "commit",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    device, device_name, _ = pick_device(args.device)
    scale = args.scale or cfg.default_scale(device)
    plan = [
        cfg.resolve(args.arm, args.k, scale, device, repeat, interval=float(interval), threads=args.threads)
        for repeat in range(args.repeats)
        for interval in args.intervals.split(",")
    ]
    folder = args.results / (args.machine or cfg.machine_name(device, device_name))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as results, (folder / "sampler.csv").open("w", newline="", buffering=1) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for config in plan:
            record = run_one(config, Path(results, "here"))
            if record["status"] != "ok" or "lost_after_s" in record["sampler"]:
                raise ConfigError(f"a run failed: {record['error'] or 'its sampler was lost'}; try experiments.train")
            sampler, peak = record["sampler"], main_peak(record)[0]
            writer.writerow(
                {
                    "interval_s": config.interval,
                    "repeat": config.repeat,
                    "missed_bytes": sampler["peak_missed_bytes"],
                    "peak_bytes": peak,
                    **{name: sampler[name] for name in COLUMNS[2:4]},
                    **{name: record[name] for name in COLUMNS[6:]},
                }
            )
            print(
                f"{config.interval * 1000:.0f} ms, {config.repeat + 1} of {args.repeats}: every "
                f"{sampler['achieved_interval_s'] * 1000:.1f} ms, longest gap "
                f"{sampler['longest_gap_s'] * 1000:.0f} ms, missed {sampler['peak_missed_bytes'] / 2**20:.1f} "
                f"of {peak / 2**20:.0f} MiB",
                flush=True,
            )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evidence.sampler_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--arm", default="shared")
    parser.add_argument("--scale", help="default: seed on CUDA, cpu elsewhere")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--intervals", default="0.01,0.05,0.1", help="seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="holds one folder a machine")
    parser.add_argument("--machine", help="folder name below --results; default: from the device's name")
    return cfg.exit_code("sampler_check", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
