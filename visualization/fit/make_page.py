"""docs/fit.html: which training fits which card, in one file that needs nothing else, made of docs/fit.json.

python -m visualization.fit.make_page

The data are sums that `python -m experiments.fitting.fit_data` fits to the planner's simulations, with what
`python -m experiments.fitting.fit_check` found; how far the planner was from what was measured, and what PyTorch sees
of cards (rloo_memory/plan/accuracy); how far it was from published figures of GPUs (results/published/predicted.csv).
"""

import json
from pathlib import Path
from string import Template

from visualization.tables.of_plans import allocated, read_peaks

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS, ACCURACY, PUBLISHED = ROOT / "docs", ROOT / "rloo_memory" / "plan" / "accuracy", ROOT / "results" / "published"


def page(data: dict) -> str:
    """The page as HTML."""
    measured, cards = (json.loads((ACCURACY / name).read_text()) for name in ("measured.json", "cards.json"))
    near, _ = allocated(read_peaks(PUBLISHED))  # measured over predicted on one GPU
    published = {"peaks": len(near), "apart": (near - 1).abs().max()}
    data = data | {"measured_over_predicted": measured["errors"], "published": published, "cards": cards["cards"]}
    text = json.dumps(data, separators=(",", ":"))
    return Template((HERE / "fit.html").read_text()).substitute(
        style=(HERE / "fit.css").read_text(),
        data=text.replace("<", "\\u003c"),  # no tag of the page's own
        script="\n".join((HERE / name).read_text() for name in ("sums.js", "settings.js", "fit.js")),
    )


def main() -> None:
    source, out = DOCS / "fit.json", DOCS / "fit.html"
    data = json.loads(source.read_text())
    out.write_text(page(data))
    print(f"{out}: {len(data['models'])} models, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
