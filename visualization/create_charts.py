"""Draw every chart that the results allow, as PNG and SVG.

python -m visualization.create_charts RESULTS_MACHINE_DIR [--out DIR] [--scale S]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from visualization import style
from visualization.charts.audit import audit
from visualization.charts.convergence import convergence
from visualization.charts.idea import idea
from visualization.charts.peak_by_k import peak_by_k
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.timelines import timeline_peak_preserving, timeline_ultra_smooth
from visualization.results import BENCH, LEARN, Results, load

CHARTS = (timeline_peak_preserving, timeline_ultra_smooth, audit, idea)


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Name and figure of every chart that these runs of one scale allow. Lines over many k take the place of bars."""
    lines = peak_by_k(results) if results.charted() == [BENCH] else None
    yield ("peak_by_k", lines) if lines else ("peak_comparison", peak_comparison(results))
    for draw in CHARTS:
        if figure := draw(results):
            yield draw.__name__, figure


def draw_all(results: Results, out: Path, scale: str | None = None) -> list[Path]:
    """Draw the charts of the scale, or of each that has charts, and the training curves where there are any: the first
    one's into `out`, any other's into a folder of its name there. Returns the files."""
    written = []
    for number, name in enumerate([scale] if scale else results.charted()):
        for chart, figure in figures(results.of(name)):
            written += style.save(figure, out / name if number else out, chart)
    if curves := convergence(results.of(LEARN)):
        written += style.save(curves, out, "convergence")
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the charts and print the files written."""
    parser = argparse.ArgumentParser(prog="python -m visualization.create_charts", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results/<machine>")
    parser.add_argument("--out", type=Path, help="folder to write to (default: charts in the results folder)")
    parser.add_argument("--scale", help="draw only this scale (default: what everybody runs, and bench)")
    args = parser.parse_args(argv)
    results = load(args.results)
    if args.scale and args.scale not in results.scales():
        found = ", ".join(results.scales())
        sys.exit(f"error: {args.results}: has no runs at scale {args.scale}; it has {found}")
    for path in draw_all(results, args.out or args.results / "charts", args.scale):
        print(path)


if __name__ == "__main__":
    main()
