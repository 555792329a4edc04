"""Draw every chart that the results allow, as PNG and SVG."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from visualization import style
from visualization.charts.audit import audit
from visualization.charts.convergence import convergence
from visualization.charts.idea import idea
from visualization.charts.peak_by_k import peak_by_k
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.timelines import timeline_peak_preserving, timeline_ultra_smooth
from visualization.results import BENCH, LEARN, Results

CHARTS = (timeline_peak_preserving, timeline_ultra_smooth, audit, idea)


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Name and figure of every chart that these runs of one scale allow. Lines over many k take the place of bars."""
    lines = peak_by_k(results) if results.charted() == [BENCH] else None
    yield ("peak_by_k", lines) if lines else ("peak_comparison", peak_comparison(results))
    for draw in CHARTS:
        if figure := draw(results):
            yield draw.__name__, figure


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draw the charts of each scale that has charts, and the training curves where there are any: the first scale's
    into `out`, any other's into a folder of its name there. Returns the files."""
    written = []
    for number, name in enumerate(results.charted()):
        for chart, figure in figures(results.of(name)):
            written += style.save(figure, out / name if number else out, chart)
    if curves := convergence(results.of(LEARN)):
        written += style.save(curves, out, "convergence")
    return written
