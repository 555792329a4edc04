"""Draw every chart that the results allow, as PNG and SVG.

python -m visualization.create_charts RESULTS_MACHINE_DIR [--out DIR] [--scale S] [--baseline classic-baseline]
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from visualization import style
from visualization.audit import audit, convergence
from visualization.bench import frontier, peak_by_k
from visualization.load import load
from visualization.peaks import peak_comparison, phase_peaks
from visualization.runs import LEARN, LoadError, Run, read_csv, run_cli
from visualization.timelines import timeline_peak_preserving, timeline_ultra_smooth

# These go into the charts folder itself, any other into one of its name
DEFAULT_SCALES = ("seed", "cpu", "2025")


def figures(runs: Sequence[Run], baseline: str) -> Iterator[tuple[str, Figure]]:
    """Name and figure of every chart that these runs of one scale allow."""
    yield "peak_comparison", peak_comparison(runs, baseline)
    yield "timeline_peak_preserving", timeline_peak_preserving(runs)
    yield "timeline_ultra_smooth", timeline_ultra_smooth(runs)
    extra = (("audit", audit), ("phases", phase_peaks), ("frontier", frontier), ("peak_by_k", peak_by_k))
    for name, figure in ((name, draw(runs)) for name, draw in extra):
        if figure is not None:
            yield name, figure


def load_convergence(results: Path) -> pd.DataFrame:
    """All rows of results/<machine>/convergence/*.csv (step, arm, reward, loss, kl), empty without such files."""
    paths = sorted(results.glob("convergence/*.csv")) if results.is_dir() else []
    frames = [
        read_csv(
            path, ("step", "arm", "reward", "loss", "kl"), "run the suite at scale learn again", text_columns=("arm",)
        )
        for path in paths
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the charts and print the files written. Raises LoadError."""
    parser = argparse.ArgumentParser(prog="python -m visualization.create_charts", description=__doc__)
    parser.add_argument("results", type=Path, help="results/<machine>, a folder of 2025, or a combined CSV of 2025")
    parser.add_argument("--out", type=Path, help="folder to write to (default: charts in the results folder)")
    parser.add_argument("--scale", help="draw only this scale (default: every scale found)")
    parser.add_argument("--baseline", default="classic-baseline", help="arm that percentages refer to")
    args = parser.parse_args(argv)
    runs = load(args.results)
    out = args.out or (args.results if args.results.is_dir() else args.results.parent) / "charts"
    found = sorted({run.scale for run in runs})
    if args.scale and args.scale not in found:
        raise LoadError(f"{args.results}: has no runs at scale {args.scale}; it has {', '.join(found)}")
    scales = [args.scale] if args.scale else [scale for scale in found if scale != LEARN]
    written = []
    for scale in scales:
        chosen = [run for run in runs if run.scale == scale]
        folder = out if scale in DEFAULT_SCALES or len(scales) == 1 else out / scale
        for name, figure in figures(chosen, args.baseline):
            written += style.save(figure, folder, name)
    steps = load_convergence(args.results)
    if len(steps):
        learned = [run for run in runs if run.scale == LEARN] or list(runs)
        written += style.save(convergence(steps, learned), out, "convergence")
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
