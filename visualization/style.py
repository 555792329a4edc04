"""How every chart looks: colours that colour-blind readers tell apart, marks that survive grey print, one footer."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from visualization.results import GIB, Results, in_words

# A fixed salt: the same results give the same SVG, byte for byte.
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
K_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "8")


def _look(arm: str) -> tuple:
    return _LOOKS.get(arm) or _OTHERS[sum(arm.encode()) % len(_OTHERS)]


def colour(arm: str) -> str:
    return _look(arm)[0]


def bar(arm: str) -> dict:
    return {"facecolor": _look(arm)[0], "hatch": _look(arm)[1], "edgecolor": "white", "linewidth": 0}


def line(arm: str) -> dict:
    """But for its marker."""
    return {"color": _look(arm)[0], "linestyle": _look(arm)[2]}


def marker(arm: str) -> str:
    return _look(arm)[3]


def write_at(axes: Axes, text: str, at: tuple[float, float], right: float, up: float, **look) -> None:
    """Text so many points to the right of a place and above it."""
    axes.annotate(text, at, xytext=(right, up), textcoords="offset points", **look)


def footer(results: Results, note: str = "", arms: Sequence[str] = ()) -> list[str]:
    """What a chart needs to be read alone: what was measured on what, the arms in words, and which runs are not what
    they seem."""
    lines = [results.describe(), note, in_words([*arms, *results.arms]), *results.footnotes()]
    return [line for line in lines if line]


def without_peak(cells: pd.DataFrame) -> str:
    """The cells where no run finished, and why."""
    return ", ".join(f"{cell.arm} k={cell.k} ({cell.failure})" for cell in cells[cells.ok == 0].itertuples())


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


def draw_budget(axes: Axes, results: Results) -> float | None:
    """A dashed line per distinct budget. Returns the highest one in GiB, None without one."""
    budgets = sorted(set(results.own.budget_bytes.dropna() / GIB))
    for budget in budgets:
        axes.axhline(budget, color="black", linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        words = f"budget for torch's allocations: {budget:.3g} GiB"
        write_at(axes, words, (0, budget), 4, 3, xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    return budgets[-1] if budgets else None


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png (150 dpi) and NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    # The layout's solver ends a billionth apart from process to process, which the SVG's last digits would show
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(place, 5) for place in axes.get_position().bounds])
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def draw_one(about: str, figure_of: Callable[[Path], Figure]) -> None:
    """The command of a chart that is drawn alone: SOURCE OUT.png."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, help="the PNG to write")
    args = parser.parse_args()
    if not args.source.exists():
        parser.error(f"{args.source}: no such file or folder")
    figure_of(args.source).savefig(args.out, dpi=150)
    print(args.out)
