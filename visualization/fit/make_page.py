"""docs/fit.html: which training fits which card, in one file that needs nothing else, made of docs/fit.json.

python -m visualization.fit.make_page

The data are sums that `python -m experiments.fitting.fit_data` fits to the planner's simulations, with what
`python -m experiments.fitting.fit_check` found when it compared them with the planner, if it did; how far the planner
was from what was measured, and what PyTorch sees of cards (measured.json, cards.json in rloo_memory/plan/accuracy).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template

from visualization.charts.plan import KINDS
from visualization.files import read_json, run_cli, write_text

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
ACCURACY = DOCS.parent / "rloo_memory" / "plan" / "accuracy"
REMEDY = "make it with python -m experiments.fitting.fit_data"
# matplotlib's hatches as CSS: layers of a background
HATCHES = {
    "": "",
    "//": "repeating-linear-gradient(135deg, #fff9 0 1px, #0000 1px 5px)",
    "\\\\": "repeating-linear-gradient(45deg, #fff9 0 1px, #0000 1px 5px)",
    "||": "repeating-linear-gradient(90deg, #fff9 0 1px, #0000 1px 5px)",
    "--": "repeating-linear-gradient(0deg, #0006 0 1px, #0000 1px 5px)",
    "xx": "repeating-linear-gradient(45deg, #fff9 0 1px, #0000 1px 5px), "
    "repeating-linear-gradient(135deg, #fff9 0 1px, #0000 1px 5px)",
    "..": "radial-gradient(#fffc 1px, #0000 1.5px) 0 0 / 6px 6px",
    "++": "repeating-linear-gradient(0deg, #fff9 0 1px, #0000 1px 5px), "
    "repeating-linear-gradient(90deg, #fff9 0 1px, #0000 1px 5px)",
    "oo": "radial-gradient(#0000 1px, #fffc 1.2px 2px, #0000 2.2px) 0 0 / 8px 8px",
}


def colours() -> str:
    """The kinds' colours and hatches, those of the project's charts, as CSS."""
    lines = []
    for kind, (colour, hatch) in KINDS.items():
        layers = ", ".join(filter(None, (HATCHES[hatch], colour)))
        lines.append(f".kind-{kind.lower().replace(' ', '-')} {{ background: {layers}; }}")
    return "\n".join(lines)


def page(data: dict, measured: dict) -> str:
    """The page as HTML."""
    cards = read_json(ACCURACY / "cards.json", "git restore it")["cards"]
    data = {**data, "measured_over_predicted": measured, "cards": cards, "kinds": list(KINDS)}
    text = json.dumps(data, separators=(",", ":"))
    return Template((HERE / "fit.html").read_text()).substitute(
        style=(HERE / "fit.css").read_text() + colours(),
        data=text.replace("<", "\\u003c"),  # no tag of the page's own
        script="\n".join((HERE / name).read_text() for name in ("sums.js", "settings.js", "fit.js")),
    )


def main(argv: Sequence[str] | None = None) -> int:
    about = __doc__.splitlines()[0]
    argparse.ArgumentParser(prog="python -m visualization.fit.make_page", description=about).parse_args(argv)
    data, out = read_json(DOCS / "fit.json", REMEDY), DOCS / "fit.html"
    measured = read_json(ACCURACY / "measured.json", "make it with python -m experiments.checks.measured_ranges")
    write_text(out, page(data, measured["errors"]))
    print(f"{out}: {len(data['models'])} models, {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
