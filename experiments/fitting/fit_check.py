"""Compares docs/fit.json with the planner at 200 random choices: results/plans/fit_check.csv.

    python -m experiments.fitting.fit_check [--processes 2]

A choice is a model, what is trained, an arm, lengths, cards, with or without a reference. Ends with an error if a
phase is more than 3 % apart: then the planner has changed, and `make fit-data` makes the page again. How far all are
apart goes to docs/fit.json.
"""

import functools
import json
import operator
import random
import sys
from dataclasses import replace

import pandas

from experiments.config import ROOT
from experiments.fitting.fit_data import MODELS, ON_ONE_CARD, PAGE, PAGE_ARMS, TRAINED, in_processes, processes
from experiments.fitting.sums import drawn, setup_at, values
from rloo_memory.errors import ConfigError, program
from rloo_memory.models import named_config
from rloo_memory.plan.options import quiet
from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.scale_up.sharding import spread, weights_by_place
from rloo_memory.plan.simulation.simulate import PHASES
from rloo_memory.plan.smallest import on_cards

TABLE = ROOT / "results" / "plans" / "fit_check.csv"
MOST_APART = 0.03
CHOICE = ("model", "trained", "arm", "prompt_tokens", "completion_tokens", "k", "cards", "reference")
COLUMNS = (*CHOICE, "goes_whole", *(f"{phase}_{whose}_bytes" for phase in PHASES for whose in ("planned", "page")))


def choices(data: dict, number: int = 200) -> list[dict]:
    """Of all that the page offers."""
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


LENGTHS = operator.itemgetter("prompt_tokens", "completion_tokens", "k")


def setup_of(choice: dict):
    """The `Setup` that a choice of the page stands for, in its arm."""
    setup = replace(on_cards(TRAINED[choice["trained"]][1], choice["cards"]), beta=0.05 * choice["reference"])
    return setup_at(setup, choice["arm"], LENGTHS(choice))


def page_peaks(data: dict, choice: dict) -> dict[str, int]:
    """Bytes of each phase by the page's sums, as `visualization/fit/sums.js` adds them up."""
    model = next(each for each in data["models"] if each["name"] == choice["model"])
    at = dict(enumerate(values(data["terms"], model["window"], [LENGTHS(choice)])[0]))
    setup, weights = setup_of(choice), weights_by_place(named_config(choice["model"]))

    def total(stretch: dict[str, dict[str, float]], phase: str) -> int:
        kinds = {kind: sum(size * at[int(term)] for term, size in terms.items()) for kind, terms in stretch.items()}
        if not choice["reference"]:
            kinds.pop("reference", None)
        return round(sum(spread(setup, weights, 0, phase, kinds).values()))

    phases = model["several" if choice["cards"] > 1 else "trained"][choice["trained"]][choice["arm"]]
    return {phase: max(total(stretch, phase) for stretch in stretches) for phase, stretches in phases.items()}


def row_of(choice: dict, data: dict) -> dict:
    setup = setup_of(choice)
    with quiet():
        planned = extrapolate.phase_peaks(setup, named_config(choice["model"]))
    row, page = choice | {"goes_whole": int(setup.as_run is not setup)}, page_peaks(data, choice)
    for peak in planned:
        row |= {f"{peak.phase}_planned_bytes": peak.total, f"{peak.phase}_page_bytes": page[peak.phase]}
    return row


def page_over_planned(rows: pandas.DataFrame) -> pandas.DataFrame:
    """A row a choice, a column a phase, and that of the highest one."""
    page, planned = (rows[[f"{phase}_{whose}_bytes" for phase in PHASES]] for whose in ("page", "planned"))
    ratios = page / planned.to_numpy()
    return ratios.assign(peak=page.max(axis=1) / planned.max(axis=1))


def apart(rows: pandas.DataFrame) -> pandas.Series:
    """The largest relative difference of a phase."""
    return (page_over_planned(rows).drop(columns="peak") - 1).abs().max(axis=1)


def compared(rows: pandas.DataFrame) -> dict:
    """How far the page is from the planner at these choices, and how far below it, both relative. The page does not
    know of prompts so short that trainers take rows whole: those peaks by themselves."""
    whole, shared = page_over_planned(rows[rows.goes_whole == 1]).peak, rows[rows.goes_whole == 0]
    below = 1 - page_over_planned(shared).drop(columns="peak").min(axis=None)
    of_whole = {"whole_choices": len(whole), "whole_low": whole.min(), "whole_high": whole.max()}
    return {"choices": len(shared), "apart": apart(shared).max(), "below": max(0, below), **of_whole}


@program("fit_check")
def main(argv: list[str] | None) -> int:
    number, data = processes("fitting.fit_check", __doc__, argv), json.loads(PAGE.read_text())
    rows = pandas.DataFrame(in_processes(functools.partial(row_of, data=data), choices(data), number))
    rows.to_csv(TABLE, columns=COLUMNS, index=False)
    data["compared"] = compared(rows)
    PAGE.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    shared = rows[rows.goes_whole == 0]
    worst = shared.loc[apart(shared).idxmax()]
    said = f"{data['compared']['apart']:.3%} apart at most, at {worst[list(CHOICE)].to_dict()}"
    if data["compared"]["apart"] > MOST_APART:
        raise ConfigError(f"{said}, more than {MOST_APART:.0%}: the page is stale; run make fit-data")
    print(f"{len(rows)} choices: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
