"""docs/fit.html: which training fits which card, in one file that needs nothing else, made of docs/fit.json.

python -m visualization.fit.make_page

The data are sums that `python -m experiments.fitting.fit_data` fits to the planner's simulations, with what
`python -m experiments.fitting.fit_check` found; how far the planner was from what was measured, and what PyTorch sees
of cards (rloo_memory/plan/accuracy); how far it was from published figures of GPUs (results/published/predicted.csv).
"""

import json
import math
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from visualization.tables.of_plans import allocated, read_peaks

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS, ACCURACY, PUBLISHED = ROOT / "docs", ROOT / "rloo_memory" / "plan" / "accuracy", ROOT / "results" / "published"


def page(data: dict) -> str:
    """The page as HTML."""
    measured, cards = (json.loads((ACCURACY / name).read_text()) for name in ("measured.json", "cards.json"))
    near, _ = allocated(read_peaks(PUBLISHED))  # measured over predicted on one GPU
    errors, said = measured["errors"], data["compared"]
    text = json.dumps(data | {"measured_over_predicted": errors}, separators=(",", ":"))
    return (
        Environment(loader=FileSystemLoader(HERE), autoescape=True)
        .get_template("fit.html")
        .render(
            data,
            owners=groupby(data["models"], lambda model: model["name"].split("/")[0]),
            cards=cards["cards"],
            measured=f"{errors['peaks']} measured peaks on a {errors['devices']} were {errors['low']:.2f} to "
            f"{errors['high']:.2f} of the predicted ones",
            others=f"{len(near)} peaks of GPUs that others published, of TRL and torchtune as they are, within "
            f"{math.ceil(1000 * (near - 1).abs().max()) / 10} % of the predicted ones.",
            compared=said
            | {name: f"{max(0.01, 100 * said[name]):.2f}" for name in ("apart", "below")}
            | {name: f"{said[name]:.2f}" for name in ("whole_low", "whole_high")},
            style=(HERE / "fit.css").read_text(),
            json=text.replace("<", "\\u003c"),  # no tag of the page's own
            script="\n".join((HERE / name).read_text() for name in ("sums.js", "settings.js", "fit.js")),
        )
    )


def main() -> None:
    source, out = DOCS / "fit.json", DOCS / "fit.html"
    data = json.loads(source.read_text())
    out.write_text(page(data))
    print(f"{out}: {len(data['models'])} models, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
