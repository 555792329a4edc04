"""Compares docs/fit.json with the planner at random choices: results/plans/fit_check.csv.

    python -m experiments.fitting.fit_check [--stale] [--processes 2]

A choice is a model, what is trained, an arm, lengths, devices, with or without a reference. Ends with an error if a
phase is more than 2 % apart: then the planner has changed, and `make fit-data` makes the page again. With --stale,
only 24 of the 200 choices, and nothing is written. How far all are apart goes to docs/fit.json.
"""

import argparse
import json
import math
import os
import random
import sys
from dataclasses import replace
from functools import partial

from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.config import ROOT
from experiments.fitting.fit_data import MODELS, ON_ONE_CARD, PAGE, TRAINED, in_processes, on_cards
from experiments.record import write_csv
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.plan.levers import planned
from rloo_memory.plan.options import quiet

TABLE = ROOT / "results" / "plans" / "fit_check.csv"
MOST_APART = 0.02
CHOICES, STALE = 200, 24
CHOICE = ("model", "trained", "arm", "prompt_tokens", "completion_tokens", "k", "cards", "reference")
PHASES = ("load", "generate", "score", "train", "optimizer")
COLUMNS = (*CHOICE, *(f"{phase}_{whose}_bytes" for phase in PHASES for whose in ("planned", "page")))


def choices(data: dict, number: int, seed: int = 7) -> list[dict]:
    """Of all that the page offers; each order of magnitude of a length is as likely. A model that the page lacks
    changes no choice of the others."""
    rng = random.Random(seed)
    least, most = data["least"], data["most"]
    positions = {model["name"]: model["positions"] for model in data["models"]}

    def of(name: str) -> int:
        return round(math.exp(rng.uniform(math.log(least[name]), math.log(most[name]))))

    found = []
    while len(found) < number:
        model, trained = rng.choice(MODELS), rng.choice(list(data["trained"]))
        lengths = {"prompt_tokens": of("prompt"), "completion_tokens": of("completion"), "k": of("k") // 2 * 2}
        cards = 1 if trained in ON_ONE_CARD else rng.choice((1, 1, 2, 4, 8))
        reference = rng.choice((0, 1))
        arm = rng.choice(("stock", "stock-accumulate", "shared"))
        if lengths["prompt_tokens"] + lengths["completion_tokens"] <= positions.get(model, 0):
            found.append(
                {"model": model, "trained": trained, "arm": arm} | lengths | {"cards": cards, "reference": reference}
            )
    return found


def few(found: list[dict]) -> list[dict]:
    """Some of them, with every model, and every arm of all that is trained on one card and on several."""
    chosen, seen = [], set()
    for choice in found:
        kinds = {choice["model"], (choice["trained"], choice["arm"], choice["cards"] > 1)}
        if not kinds <= seen:
            chosen.append(choice)
            seen |= kinds
    return [*chosen, *(choice for choice in found if choice not in chosen)][:STALE]


def setup_of(choice: dict):
    """The `Setup` that a choice of the page stands for, in its arm."""
    k = choice["k"]
    setup = replace(
        on_cards(TRAINED[choice["trained"]][1], choice["cards"]),
        prompt_tokens=choice["prompt_tokens"],
        max_completion_length=choice["completion_tokens"],
        num_generations=k,
        per_device_train_batch_size=k,
        beta=0.05 * choice["reference"],
    )
    return planned(choice["arm"], setup)


def page_peaks(data: dict, choice: dict) -> dict[str, float]:
    """Bytes of each phase by the page's sums, as `visualization/fit/sums.js` adds them up."""
    from experiments.fitting.fit_curves import Regime, sizes_at
    from rloo_memory.plan.scale_up.sharding import SHARDED

    model = next(each for each in data["models"] if each["name"] == choice["model"])
    lengths, cards = (choice["prompt_tokens"], choice["completion_tokens"], choice["k"]), choice["cards"]
    wider = data["trained"][choice["trained"]]["widened"]

    def held(phase: str, kinds: dict[str, float]) -> float:
        left_out = {"host"} if choice["reference"] else {"host", "reference"}
        sharded = SHARDED if cards > 1 else ()
        sharded += ("activations",) if cards > 1 and phase == "optimizer" else ()
        return sum(
            math.ceil(size * wider[kind] / cards) if kind in sharded else size
            for kind, size in kinds.items()
            if kind not in left_out
        )

    peaks, arms = {}, model["trained"][choice["trained"]]
    if cards > 1:
        arms = arms | model["several"][choice["trained"]]
    for phase, regimes in arms[choice["arm"]].items():
        each = sizes_at([Regime(**regime) for regime in regimes], model["window"], lengths)
        gathered = model["gathered"][choice["trained"]][phase].values() if cards > 1 else ()
        peaks[phase] = max(held(phase, kinds) for kinds in each) + sum(gathered)
    return peaks


def planned_peaks(choice: dict) -> dict[str, int]:
    from rloo_memory.models import named_config
    from rloo_memory.plan.scale_up import extrapolate

    with quiet():
        peaks = extrapolate.phase_peaks(setup_of(choice), named_config(choice["model"]))
    return {peak.phase: peak.total for peak in peaks}


def row_of(choice: dict, data: dict) -> dict:
    planned, page = planned_peaks(choice), page_peaks(data, choice)
    sizes = {f"{phase}_planned_bytes": planned[phase] for phase in PHASES}
    return choice | sizes | {f"{phase}_page_bytes": round(page[phase]) for phase in PHASES}


def page_over_planned(row: dict) -> list[float]:
    return [int(row[f"{phase}_page_bytes"]) / int(row[f"{phase}_planned_bytes"]) for phase in PHASES]


def apart(row: dict) -> float:
    """The largest relative difference of a phase."""
    return max(abs(ratio - 1) for ratio in page_over_planned(row))


def compared(rows: list[dict]) -> dict:
    """How far the page is from the planner at these choices, and how far below it, both relative."""
    below = max(1 - ratio for row in rows for ratio in page_over_planned(row))
    return {"choices": len(rows), "apart": max(map(apart, rows)), "below": max(0, below)}


def run(args: argparse.Namespace) -> int:
    if args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}; it must be at least 1")
    if not PAGE.exists():
        raise ConfigError(f"{PAGE} is missing; make it with python -m experiments.fitting.fit_data")
    data = json.loads(PAGE.read_text())
    use_fork(ARMS["shared"])
    wanted = choices(data, CHOICES)
    wanted = few(wanted) if args.stale else wanted
    rows = {}
    try:
        for row, left in in_processes(partial(row_of, data=data), wanted, args.processes):
            what = tuple(row[name] for name in CHOICE)
            rows[what] = row
            said = ", ".join(map(str, what))
            print(f"{len(rows)} of {len(wanted)}: {said}: {apart(row):.3%}; about {left:.0f} min left", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted with {len(rows)} of {len(wanted)} choices; nothing is written", file=sys.stderr)
        return 130
    worst = max(rows.values(), key=apart)
    print(f"{len(rows)} choices: {apart(worst):.3%} apart at most")
    if apart(worst) > MOST_APART:
        raise ConfigError(
            f"{ {name: worst[name] for name in CHOICE} } is {apart(worst):.1%} apart, more than {MOST_APART:.0%}: the "
            "page is stale; run make fit-data"
        )
    if not args.stale:
        write_csv(TABLE, COLUMNS, [rows[tuple(choice[name] for name in CHOICE)] for choice in wanted])
        data["compared"] = compared(list(rows.values()))
        PAGE.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fitting.fit_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stale", action="store_true", help=f"{STALE} choices: whether the page is still right")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return exit_code("fit_check", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
