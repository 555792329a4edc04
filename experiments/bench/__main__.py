"""Ways to do one thing, measured side by side: alternating, several repeats, each cell in a process of its own.

    python -m experiments.bench worth [--models wide] [--cells 3000x100x8,200x1000x8] [--ways whole,shared]

Ways whose seconds are less than 10 % apart are repeated more often than others, unless --repeats says how often.
Writes results/<machine>/bench.csv, a row a cell, way and metric: median, lowest and highest of the repeats. A way
that fails or runs out of memory is a row that says so. Each sample is kept as soon as it is taken, in
bench_samples.jsonl, and the same command goes on where it was stopped; samples of other code are not taken up. Exit
codes: 0 all is measured, 4 all is and some way failed, 5 what fitted into --minutes, 1 a cell's process was ended.

Measurements:
"""

import argparse
import re
import sys
import time
from dataclasses import replace

from experiments.bench.alternating import OUT_OF_MEMORY, in_its_own_process
from experiments.bench.measurements import MEASUREMENTS, Measurement
from experiments.bench.samples import Cell, Samples, warn_of_outliers
from experiments.config import check_limit
from experiments.measuring import EXIT_VERDICT, Parser, is_committed, place, words
from experiments.processes import stoppable
from experiments.run_options import add_minutes, whole
from rloo_memory.errors import EXIT_TIME, EXIT_USAGE, ConfigError, choose, exit_code

LONGER = 1.5  # than the longest cell so far: what the next one may take


def main(argv: list[str] | None = None) -> int:
    with stoppable():
        return exit_code("bench", run, argv)


def run(argv: list[str] | None) -> int:
    names = "".join(f"    {name:14} {measurement.about}\n" for name, measurement in MEASUREMENTS.items())
    parser = Parser("bench", __doc__ + names)
    parser.add_argument("measurement", help="its name")
    parser.add_argument("--models", help="some of those that the measurement knows; default: those of its cells")
    parser.add_argument("--cells", help="prompt x completion tokens x k, like 3000x100x8; default: its own")
    parser.add_argument("--ways", help="some of its ways; default: all")
    parser.add_argument("--repeats", type=whole)
    parser.add_argument("--list", action="store_true", help="print the cells and ways, and measure nothing")
    add_minutes(parser)
    parser.add_fresh()
    args = parser.parse_args(argv)
    begun = time.monotonic()
    name = args.measurement
    measurement = MEASUREMENTS[choose("measurement", name, MEASUREMENTS)]
    cells = chosen(measurement, args.models, args.cells)
    ways = chosen_ways(measurement, args.ways)
    repeats = measurement.repeats, measurement.repeats_near
    if args.repeats is not None:
        check_limit("repeats", args.repeats, 1, 100)
        repeats = args.repeats, args.repeats
    if args.list:
        print(*cells, f"ways: {', '.join(ways)}; repeats: {repeats[0]}, of those near another {repeats[1]}", sep="\n")
        return 0
    args.device = on(measurement, name, args)
    here = place(args, "peft")
    samples = Samples(here.folder, name, here.facts)
    failed, longest = [], measurement.seconds / LONGER
    for number, cell in enumerate(cells, start=1):
        if args.fresh or not is_committed(here.facts["commit"]):
            samples.forget(cell)
        missing = samples.missing(cell, ways, *repeats)
        print(f"{number} of {len(cells)}: {cell}" + ("" if missing else ", there"), flush=True)
        if missing:
            left = 60 * args.minutes - (time.monotonic() - begun)
            if LONGER * longest > left:
                print(f"not begun, may take {LONGER * longest:.0f} s of {max(0, left):.0f}", flush=True)
                return EXIT_TIME
            started = time.monotonic()
            code = in_its_own_process(name, cell, ways, repeats, here)
            if code:
                return ended(cell, code)
            longest = max(longest, time.monotonic() - started)
        rows = samples.publish(cell)
        print("\n".join(told(rows, ways)), flush=True)
        warn_of_outliers(cell, rows)
        failed += [row for row in rows if row["failure"] and not row["failure"].startswith(OUT_OF_MEMORY)]
    print(here.folder / "bench.csv")
    return EXIT_VERDICT if failed else 0


def ended(cell: Cell, code: int) -> int:
    """What ends this program when a cell's process ended so."""
    if code in (EXIT_TIME, EXIT_USAGE):  # it has said why
        return code
    print(f"bench: {cell}: ended with exit code {code}; the same command goes on from there", file=sys.stderr)
    return 1


def chosen(measurement: Measurement, models: str | None, cells: str | None) -> tuple[Cell, ...]:
    """The measurement's own cells, or each of these sizes with each of these models. Raises `ConfigError`."""
    names = dict.fromkeys(cell.model for cell in measurement.cells)
    if models is not None:
        names = words("model", models, measurement.models)
    without_lengths = measurement.cells[0].prompt_tokens is None
    if cells is None and without_lengths:
        return tuple(replace(measurement.cells[0], model=name) for name in names)
    if cells is None:
        own = [cell for cell in measurement.cells if cell.model in names]
        if others := [name for name in names if name not in {cell.model for cell in own}]:
            raise ConfigError(f"--models {others[0]} has no cells of its own here; name some: --cells 3000x100x8")
        return tuple(own)
    if without_lengths:
        raise ConfigError(f"--cells {cells[:40]!r}: this measurement has no lengths; leave the option out")
    sizes = [size_of(text) for text in cells.split(",")]
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--cells {cells[:60]} names a cell twice; name it once")
    return tuple(Cell(name, *size) for size in sizes for name in names)


def size_of(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,4})", text)
    size = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if not (2 <= size[0] <= 100_000 and 1 <= size[1] <= 100_000 and 2 <= size[2] <= 1000):
        raise ConfigError(
            f"--cells {text[:40]!r}: write prompt x completion tokens x k, like 3000x100x8; up to 100,000 tokens "
            "each, k from 2 to 1,000"
        )
    return size


def chosen_ways(measurement: Measurement, ways: str | None) -> tuple[str, ...]:
    """In the measurement's order, whose first is what others are compared with. Raises `ConfigError`."""
    asked = words("way", ways, measurement.ways) if ways is not None else measurement.ways
    if measurement.ways[0] == "whole" and "whole" not in asked:
        raise ConfigError(f"--ways {ways}: the others are compared with `whole`; name it, too")
    return tuple(way for way in measurement.ways if way in asked)


def on(measurement: Measurement, name: str, args: argparse.Namespace) -> str:
    """The device to measure on. Raises `ConfigError` where the measurement has no meaning there."""
    only = measurement.device
    if only and args.device not in ("auto", only) and not args.device.startswith(f"{only}:"):
        raise ConfigError(f"--device {args.device}: {name} is measured on {only} alone")
    return only if only and args.device == "auto" else args.device


def told(rows: list[dict], ways: tuple[str, ...]) -> list[str]:
    """Medians for who watches: a line a way."""
    lines = []
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        numbers = [
            f"{row['metric']} {row['median']}" for row in mine if "median" in row and "cpu" not in row["metric"]
        ]
        lines.append(f"  {way:16} " + ", ".join(numbers or [mine[0]["failure"]]))
    return lines


if __name__ == "__main__":
    sys.exit(main())
