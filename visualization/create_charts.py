"""Draw every chart that the results allow, as PNG and SVG.

python -m visualization.create_charts RESULTS_MACHINE_DIR [--out DIR] [--scale S] [--baseline classic-baseline]
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from visualization import style
from visualization.charts.audit import audit
from visualization.charts.convergence import convergence
from visualization.charts.frontier import frontier
from visualization.charts.idea import idea
from visualization.charts.peak_by_k import peak_by_k
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.phase_peaks import phase_peaks
from visualization.charts.timelines import timeline_peak_preserving, timeline_ultra_smooth
from visualization.files import LoadError, run_cli
from visualization.load import load, tell_damaged
from visualization.runs import LEARN, Run, scales

# These go into the charts folder itself, any other into one of its name
DEFAULT_SCALES = ("seed", "cpu", "2025")
BASELINE = "classic-baseline"


def figures(runs: Sequence[Run], baseline: str) -> Iterator[tuple[str, Figure]]:
    """Name and figure of every chart that these runs of one scale allow."""
    yield "peak_comparison", peak_comparison(runs, baseline)
    if any(len(run.samples) for run in runs):  # they are where they were measured
        yield "timeline_peak_preserving", timeline_peak_preserving(runs)
        yield "timeline_ultra_smooth", timeline_ultra_smooth(runs)
    extra = {"audit": audit, "phases": phase_peaks, "frontier": frontier, "peak_by_k": peak_by_k, "idea": idea}
    for name, figure in ((name, draw(runs)) for name, draw in extra.items()):
        if figure is not None:
            yield name, figure


def folder_of(scale: str, shown: Sequence[str], out: Path) -> Path:
    """Where the charts of a scale go."""
    return out if scale in DEFAULT_SCALES or len(shown) == 1 else out / scale


def draw_all(runs: Sequence[Run], out: Path, shown: Sequence[str], baseline: str = BASELINE) -> list[Path]:
    """Draw the charts of those scales, and the training curves where there are any, below `out`. Returns the files."""
    written = []
    for scale in shown:
        chosen = [run for run in runs if run.scale == scale]
        for name, figure in figures(chosen, baseline):
            written += style.save(figure, folder_of(scale, shown, out), name)
    learned = [run for run in runs if run.scale == LEARN]
    if learned and (curves := convergence(learned)):
        written += style.save(curves, out, "convergence")
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the charts and print the files written; 1 when a run was left out. Raises LoadError."""
    parser = argparse.ArgumentParser(prog="python -m visualization.create_charts", description=__doc__)
    parser.add_argument("results", type=Path, help="results/<machine>, a folder of 2025, or a combined CSV of 2025")
    parser.add_argument("--out", type=Path, help="folder to write to (default: charts in the results folder)")
    parser.add_argument("--scale", help="draw only this scale (default: every scale found)")
    parser.add_argument("--baseline", default=BASELINE, help="arm that percentages refer to")
    args = parser.parse_args(argv)
    runs = load(args.results)
    out = args.out or (args.results if args.results.is_dir() else args.results.parent) / "charts"
    found = scales(runs)
    if args.scale and args.scale not in found:
        raise LoadError(f"{args.results}: has no runs at scale {args.scale}; it has {', '.join(found)}")
    shown = [args.scale] if args.scale else [scale for scale in found if scale != LEARN]
    for path in draw_all(runs, out, shown, args.baseline):
        print(path)
    return tell_damaged(runs)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
