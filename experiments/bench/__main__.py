"""Ways to do one thing, measured side by side: alternating, several repeats, each cell in a process of its own.

    python -m experiments.bench worth [--models wide] [--cells 3000x100x8,200x1000x8] [--ways whole,shared]

Ways whose seconds are less than 10 % apart are repeated more often than others, unless --repeats says how often.
Writes results/<machine>/bench.csv, a row a cell, way and metric: median, lowest and highest of the repeats. A way
that fails or runs out of memory is a row that says so. Each sample is kept as soon as it is taken, in
bench_samples.jsonl, and the same command goes on where it was stopped; what failed is tried again, and samples of
other code are not taken up. Fewer ways or repeats than bench.csv has of a cell do not replace what it has. Exit codes:
0 all is measured, 1 some way failed or a cell's process was ended. Being out of memory is an outcome, no failure.

Measurements:
"""

import re
import sys
from concurrent.futures.process import BrokenProcessPool

from experiments.bench import alternating
from experiments.bench.measurements import MEASUREMENTS, Measurement
from experiments.bench.samples import Cell, Samples, has_failed
from experiments.commit import is_same_code
from experiments.config import check_limit
from experiments.measuring import place, words
from experiments.processes import in_its_own_process
from experiments.run_options import Parser, whole
from rloo_memory.errors import ConfigError, choose, program


@program("bench")
def main(argv: list[str] | None) -> int:
    names = "".join(f"    {name:14} {measurement.about}\n" for name, measurement in MEASUREMENTS.items())
    parser = Parser("bench", __doc__ + names)
    parser.add_argument("measurement", help="its name")
    parser.add_argument("--models", help="some of those that the measurement knows; default: those of its cells")
    parser.add_argument("--cells", help="prompt x completion tokens x k, like 3000x100x8; default: its own")
    parser.add_argument("--ways", help="some of its ways; default: all")
    parser.add_argument("--repeats", type=whole)
    parser.add_fresh()
    args = parser.parse_args(argv)
    name = choose("measurement", args.measurement, MEASUREMENTS)
    measurement = MEASUREMENTS[name]
    cells, ways = chosen(measurement, args.models, args.cells), chosen_ways(measurement, args.ways)
    repeats = listed = measurement.repeats, measurement.repeats_near
    if args.repeats is not None:
        check_limit("repeats", args.repeats, 1, 100)
        repeats = args.repeats, args.repeats
    if (only := measurement.device) and args.device not in ("auto", only):
        raise ConfigError(f"--device {args.device}: {name} is measured on {only} alone")
    args.device = only if only and args.device == "auto" else args.device
    here, failed = place(args), False
    samples, commit = Samples(here.folder, name, here.facts), here.facts["commit"]
    for number, cell in enumerate(cells, start=1):
        print(f"{number} of {len(cells)}: {cell}", flush=True)
        samples.forget(cell, all_of_it=args.fresh or not is_same_code(commit, commit))
        while samples.missing(cell, ways, *repeats):  # another process, where the device answers one no more
            try:
                in_its_own_process(alternating.measure, name, cell, ways, repeats, here)
            except BrokenProcessPool:
                print(f"bench: {cell}: its process was ended; the same command goes on", file=sys.stderr)
                return 1
        wrong = any(has_failed(sample) for sample in samples.taken(cell).values())
        complete = not wrong and not samples.missing(cell, measurement.ways, *listed)
        if more := samples.publish(cell, complete):
            said = f"keeps its rows of {cell}: it has more of {', '.join(more)}; measure as much, or delete these rows"
            print(f"bench: {here.folder / 'bench.csv'} {said}", file=sys.stderr)
        failed = failed or wrong
    print(here.folder / "bench.csv")
    return 1 if failed else 0


def chosen(measurement: Measurement, models: str | None, cells: str | None) -> tuple[Cell, ...]:
    """The measurement's own cells, or each of these sizes with each of these models. Raises `ConfigError`."""
    names = dict.fromkeys(cell.model for cell in measurement.cells)
    if models is not None:
        names = words("model", models, measurement.models)
    if cells is not None:
        return tuple(Cell(name, *size_of(text)) for text in dict.fromkeys(cells.split(",")) for name in names)
    own = [cell for cell in measurement.cells if cell.model in names]
    if others := [name for name in names if name not in {cell.model for cell in own}]:
        raise ConfigError(f"--models {others[0]} has no cells of its own here; name some: --cells 3000x100x8")
    return tuple(own)


def size_of(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,4})", text)
    prompt, completion, k = map(int, found.groups()) if found else (0, 0, 0)
    if prompt < 2 or completion < 1 or k < 2:
        raise ConfigError(
            f"--cells {text[:40]!r}: write prompt x completion tokens x k, like 3000x100x8; at least 2x1x2"
        )
    return prompt, completion, k


def chosen_ways(measurement: Measurement, ways: str | None) -> tuple[str, ...]:
    """In the measurement's order, whose first is what others are compared with. Raises `ConfigError`."""
    asked = words("way", ways, measurement.ways) if ways is not None else measurement.ways
    if measurement.ways[0] == "whole" and "whole" not in asked:
        raise ConfigError(f"--ways {ways}: the others are compared with `whole`; name it, too")
    return tuple(way for way in measurement.ways if way in asked)


if __name__ == "__main__":
    sys.exit(main())
