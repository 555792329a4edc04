"""Compares docs/fit.json with the planner at 200 random choices: results/plans/fit_check.csv.

    python -m experiments.fitting.fit_check [--processes 2]

A choice is a model, what is trained, an arm, lengths, cards, with or without a reference. Ends with an error if a
phase is more than 3 % apart: then the planner has changed, and `make fit-data` makes the page again. How far all are
apart goes to docs/fit.json.
"""

import functools
import json
import random
import sys
from dataclasses import replace

from experiments.config import ROOT
from experiments.fitting.fit_data import (
    MODELS,
    ON_ONE_CARD,
    PAGE,
    PAGE_ARMS,
    TRAINED,
    in_processes,
    on_cards,
    processes,
)
from experiments.record import write_csv
from rloo_memory.errors import ConfigError, program
from rloo_memory.plan.options import quiet

TABLE = ROOT / "results" / "plans" / "fit_check.csv"
MOST_APART = 0.03
CHOICE = ("model", "trained", "arm", "prompt_tokens", "completion_tokens", "k", "cards", "reference")
PHASES = ("load", "generate", "score", "train", "optimizer")
COLUMNS = (*CHOICE, "goes_whole", *(f"{phase}_{whose}_bytes" for phase in PHASES for whose in ("planned", "page")))


def choices(data: dict, number: int = 200) -> list[dict]:
    """Of all that the page offers."""
    from experiments.fitting.sums import drawn

    rng = random.Random(7)
    positions = {model["name"]: model["positions"] for model in data["models"]}
    found = []
    while len(found) < number:
        model, trained = rng.choice(MODELS), rng.choice(list(data["trained"]))
        prompt, completion, k = drawn(rng)
        lengths = {"prompt_tokens": prompt, "completion_tokens": completion, "k": k // 2 * 2}
        cards = 1 if trained in ON_ONE_CARD else rng.choice((1, 1, 2, 4, 8))
        reference = rng.choice((0, 1))
        what = {"model": model, "trained": trained, "arm": rng.choice(PAGE_ARMS)}
        if prompt + completion <= positions[model]:
            found.append(what | lengths | {"cards": cards, "reference": reference})
    return found


def lengths_of(choice: dict) -> tuple[int, int, int]:
    return choice["prompt_tokens"], choice["completion_tokens"], choice["k"]


def setup_of(choice: dict):
    """The `Setup` that a choice of the page stands for, in its arm."""
    from experiments.fitting.sums import setup_at

    setup = replace(on_cards(TRAINED[choice["trained"]][1], choice["cards"]), beta=0.05 * choice["reference"])
    return setup_at(setup, choice["arm"], lengths_of(choice))


def page_peaks(data: dict, choice: dict) -> dict[str, int]:
    """Bytes of each phase by the page's sums, as `visualization/fit/sums.js` adds them up."""
    from experiments.fitting.sums import values
    from rloo_memory.models import named_config
    from rloo_memory.plan.scale_up.sharding import spread, weights_by_place

    model = next(each for each in data["models"] if each["name"] == choice["model"])
    at = dict(enumerate(values(data["terms"], model["window"], [lengths_of(choice)])[0]))
    setup, weights = setup_of(choice), weights_by_place(named_config(choice["model"]))

    def total(stretch: dict[str, dict[str, float]], phase: str) -> int:
        kinds = {kind: sum(size * at[int(term)] for term, size in terms.items()) for kind, terms in stretch.items()}
        if not choice["reference"]:
            kinds.pop("reference", None)
        return round(sum(spread(setup, weights, 0, phase, kinds).values()))

    phases = model["several" if choice["cards"] > 1 else "trained"][choice["trained"]][choice["arm"]]
    return {phase: max(total(stretch, phase) for stretch in stretches) for phase, stretches in phases.items()}


def row_of(choice: dict, data: dict) -> dict:
    from rloo_memory.models import named_config
    from rloo_memory.plan.scale_up import extrapolate

    setup = setup_of(choice)
    with quiet():
        planned = extrapolate.phase_peaks(setup, named_config(choice["model"]))
    row, page = choice | {"goes_whole": int(setup.as_run is not setup)}, page_peaks(data, choice)
    for peak in planned:
        row |= {f"{peak.phase}_planned_bytes": peak.total, f"{peak.phase}_page_bytes": page[peak.phase]}
    return row


def page_over_planned(row: dict) -> list[float]:
    return [int(row[f"{phase}_page_bytes"]) / int(row[f"{phase}_planned_bytes"]) for phase in PHASES]


def apart(row: dict) -> float:
    """The largest relative difference of a phase."""
    return max(abs(ratio - 1) for ratio in page_over_planned(row))


def compared(rows: list[dict]) -> dict:
    """How far the page is from the planner at these choices, and how far below it, both relative. The page does not
    know of prompts so short that trainers take rows whole: those peaks by themselves."""
    whole = [peak_over_planned(row) for row in rows if int(row["goes_whole"])]
    rows = [row for row in rows if not int(row["goes_whole"])]
    below = max(1 - ratio for row in rows for ratio in page_over_planned(row))
    of_whole = {"whole_choices": len(whole), "whole_low": min(whole), "whole_high": max(whole)}
    return {"choices": len(rows), "apart": max(map(apart, rows)), "below": max(0, below), **of_whole}


def peak_over_planned(row: dict) -> float:
    page, planned = (max(int(row[f"{phase}_{of}_bytes"]) for phase in PHASES) for of in ("page", "planned"))
    return page / planned


@program("fit_check")
def main(argv: list[str] | None) -> int:
    number, data = processes("fitting.fit_check", __doc__, argv), json.loads(PAGE.read_text())
    rows = list(in_processes(functools.partial(row_of, data=data), choices(data), number))
    write_csv(TABLE, COLUMNS, rows)
    data["compared"] = compared(rows)
    PAGE.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    worst = max((row for row in rows if not row["goes_whole"]), key=apart)
    said = f"{apart(worst):.3%} apart at most, at { {name: worst[name] for name in CHOICE} }"
    if apart(worst) > MOST_APART:
        raise ConfigError(f"{said}, more than {MOST_APART:.0%}: the page is stale; run make fit-data")
    print(f"{len(rows)} choices: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
