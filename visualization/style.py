"""How every chart looks: colours that colour-blind readers tell apart, marks that survive grey print, one footer."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from visualization import legacy
from visualization.files import whole_file
from visualization.runs import Run, describe, footnotes, in_words

# A fixed salt and no date: the same results give the same SVG, byte for byte.
matplotlib.rcParams.update({
    "svg.hashsalt": "charts", "font.size": 9, "axes.titlesize": 10, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e3e3e3", "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8, "legend.frameon": False,
})  # fmt: skip

# Okabe-Ito; per arm: colour, hatch, line style, marker.
_LOOKS = {
    "classic-baseline": ("#D55E00", "", "-", "o"),
    "classic-string": ("#E69F00", "////", (0, (6, 1.5)), "s"),
    "classic-string-exact": ("#CC79A7", "\\\\\\\\", (0, (3, 1, 1, 1)), "D"),
    "classic-lean": ("#009E73", "....", "-", "^"),
    "stock": ("#0072B2", "xxx", (0, (4, 1, 1, 1, 1, 1)), "v"),
    "stock-accumulate": ("#56B4E9", "---", (0, (1.5, 1)), "P"),
    "stock-compact": ("#882255", "//", "-.", ">"),
    "stock-compact-accumulate": ("#AA4466", "--", (0, (3, 1.5)), "<"),
    "shared": ("#000000", "||", "-", "*"),
    "shared-accumulate": ("#117733", "\\\\", (0, (8, 2)), "p"),
    "Basic": ("#D55E00", "", "-", "o"),
    "String": ("#0072B2", "////", (0, (6, 1.5)), "s"),
}
_OTHERS = (
    ("#7F7F7F", "oo", "-", "X"),
    ("#8C6D31", "**", "--", "h"),
    ("#3F3F3F", "++", ":", "<"),
    ("#332288", "xx", "-.", "d"),
    ("#AA4499", "//", (0, (2, 2)), "8"),
)
PHASE_GREYS = {"generate": "#d9d9d9", "score": "#a6a6a6", "train": "#666666", "optimizer": "#000000"}
START_COLOUR = "#b8b8b8"
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
K_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _look(arm: str) -> tuple:
    return _LOOKS.get(arm) or _OTHERS[sum(arm.encode()) % len(_OTHERS)]


def colour(arm: str) -> str:
    """The arm's colour, the same in every chart."""
    return _look(arm)[0]


def bar(arm: str) -> dict:
    """How bars of the arm look."""
    return {"facecolor": _look(arm)[0], "hatch": _look(arm)[1], "edgecolor": "white", "linewidth": 0}


def line(arm: str) -> dict:
    """How lines of the arm look, but for their marker."""
    return {"color": _look(arm)[0], "linestyle": _look(arm)[2]}


def marker(arm: str) -> str:
    """The arm's marker."""
    return _look(arm)[3]


def write_at(axes: Axes, text: str, at: tuple[float, float], right: float, up: float, **look) -> None:
    """Text so many points to the right of a place and above it."""
    axes.annotate(text, at, xytext=(right, up), textcoords="offset points", **look)


def footer(runs: Sequence[Run], note: str = "", arms: Sequence[str] = ()) -> list[str]:
    """What a chart needs to be read alone: what was measured on what, the arms of the runs and `arms` in words, and
    which runs are not what they seem."""
    of_2025 = [legacy.NOTE] if runs[0].status == "unknown" else []
    lines = [describe(runs), note, *of_2025, in_words([*arms, *(run.arm for run in runs)]), *footnotes(runs)]
    return [line for line in lines if line]


def new_figure(
    width: float,
    height: float,
    title: str,
    small_print: Sequence[str],
    handles: Sequence[Artist] = (),
    columns: int = 4,
) -> Figure:
    """A figure of that width, with axes area of that height (inches), below title and legend and above the lines of
    small print."""
    footer = "\n".join(textwrap.fill(line, int(width * 17), break_on_hyphens=False) for line in small_print)
    above = 0.42 + 0.2 * -(-len(handles) // columns)
    below = 0.12 + 0.15 * (footer.count("\n") + 1)
    total = above + height + below
    figure = Figure(figsize=(width, total), layout="constrained")
    figure.get_layout_engine().set(rect=(0.005, below / total, 0.99, height / total))
    figure.text(0.5, 1 - 0.08 / total, title, ha="center", va="top", fontsize=12, fontweight="bold")
    figure.text(0.012, 0.06 / total, footer, va="bottom", fontsize=7.5, color="#404040", linespacing=1.3)
    if handles:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - 0.3 / total), "borderaxespad": 0}
        figure.legend(handles=handles, ncols=columns, fontsize=8.5, handlelength=2.8, **place)
    return figure


def draw_budget(axes: Axes, runs: Sequence[Run], unit: float) -> float | None:
    """A dashed line per distinct budget. Returns the highest budget in that unit of bytes, None without one."""
    budgets = sorted({run.budget_bytes / unit for run in runs if run.budget_bytes})
    for budget in budgets:
        axes.axhline(budget, color="black", linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        words = f"budget for torch's allocations: {budget:.3g} GiB"
        write_at(axes, words, (0, budget), 4, 3, xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    return budgets[-1] if budgets else None


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png (150 dpi) and NAME.svg, each whole or not at all. Raises OSError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    # The layout's solver ends a billionth apart from process to process, which the SVG's last digits would show
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(place, 5) for place in axes.get_position().bounds])
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path, options in zip(paths, ({"dpi": 150}, {"metadata": {"Date": None}}), strict=True):
        with whole_file(path) as staging:
            figure.savefig(staging, **options)
    return paths


def draw_one(
    argv: Sequence[str] | None, name: str, about: str, source: tuple[str, str], figure_of: Callable[[Path], Figure]
) -> int:
    """The command of the chart `name`: draws what it is given, for which `source` has a word and what that stands for,
    and prints the file's name. Raises LoadError of `figure_of`, OSError where the PNG cannot be written."""
    parser = argparse.ArgumentParser(prog=f"python -m visualization.charts.{name}", description=about.splitlines()[0])
    parser.add_argument("source", metavar=source[0], type=Path, help=source[1])
    parser.add_argument("out", type=Path, help="the PNG to write")
    args = parser.parse_args(argv)
    figure = figure_of(args.source)
    with whole_file(args.out) as staging:
        figure.savefig(staging, dpi=150)
    print(args.out)
    return 0
