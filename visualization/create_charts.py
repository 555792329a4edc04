"""Draw every chart that the results allow, as PNG and SVG.

python -m visualization.create_charts RESULTS_MACHINE_DIR [--out DIR] [--scale S]
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from visualization import style
from visualization.charts.audit import audit
from visualization.charts.convergence import convergence
from visualization.charts.idea import idea
from visualization.charts.peak_by_k import peak_by_k
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.phase_peaks import phase_peaks
from visualization.charts.timelines import timeline_peak_preserving, timeline_ultra_smooth
from visualization.files import LoadError, run_cli
from visualization.load import load, tell_damaged
from visualization.runs import BENCH, LEARN, Run, charted, scales


def figures(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    """Name and figure of every chart that these runs of one scale allow. Lines over many k take the place of bars."""
    lines = peak_by_k(runs) if runs[0].scale == BENCH else None
    yield ("peak_by_k", lines) if lines else ("peak_comparison", peak_comparison(runs))
    if any(len(run.samples) for run in runs):  # they are where they were measured
        yield "timeline_peak_preserving", timeline_peak_preserving(runs)
        yield "timeline_ultra_smooth", timeline_ultra_smooth(runs)
    for name, draw in {"audit": audit, "phases": phase_peaks, "idea": idea}.items():
        if figure := draw(runs):
            yield name, figure


def draw_all(runs: Sequence[Run], out: Path, scale: str | None = None) -> list[Path]:
    """Draw the charts of the scale, or of each that has charts, and the training curves where there are any: the first
    one's into `out`, any other's into a folder of its name there. Returns the files."""
    written = []
    for number, name in enumerate([scale] if scale else charted(runs)):
        chosen = [run for run in runs if run.scale == name]
        for chart, figure in figures(chosen):
            written += style.save(figure, out / name if number else out, chart)
    learned = [run for run in runs if run.scale == LEARN]
    if learned and (curves := convergence(learned)):
        written += style.save(curves, out, "convergence")
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the charts and print the files written; 1 when a run was left out. Raises LoadError."""
    parser = argparse.ArgumentParser(prog="python -m visualization.create_charts", description=__doc__)
    parser.add_argument("results", type=Path, help="results/<machine>, a folder of 2025, or a combined CSV of 2025")
    parser.add_argument("--out", type=Path, help="folder to write to (default: charts in the results folder)")
    parser.add_argument("--scale", help="draw only this scale (default: what everybody runs, and bench)")
    args = parser.parse_args(argv)
    runs = load(args.results)
    out = args.out or (args.results if args.results.is_dir() else args.results.parent) / "charts"
    found = scales(runs)
    if args.scale and args.scale not in found:
        raise LoadError(f"{args.results}: has no runs at scale {args.scale}; it has {', '.join(found)}")
    for path in draw_all(runs, out, args.scale):
        print(path)
    return tell_damaged(runs)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
