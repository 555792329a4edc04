"""Compares docs/fit.json with the planner at random choices: results/plans/fit_check.csv.

    python -m experiments.plan.fit_check [--choices 200] [--processes 2]

A choice is a model, what is trained, an arm, lengths, devices, with or without a reference. Rows of the same data are
kept, so the same command goes on where it was interrupted. Ends with an error if a phase is more than 2 % apart.
"""

import argparse
import csv
import json
import math
import os
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.builds import use_fork
from experiments.config import ARMS, ROOT, ConfigError, exit_code
from experiments.plan.fit_data import PAGE, TRAINED, in_processes
from experiments.plan.options import quiet

TABLE = ROOT / "results" / "plans" / "fit_check.csv"
MOST_APART = 0.02
CHOICE = ("model", "trained", "arm", "prompt_tokens", "completion_tokens", "k", "cards", "reference")
PHASES = ("load", "generate", "score", "train", "optimizer")
COLUMNS = (*CHOICE, *(f"{phase}_{whose}_bytes" for phase in PHASES for whose in ("planned", "page")), "code")


def choices(data: dict, number: int, seed: int = 7) -> list[dict]:
    """Of all that the page offers; each order of magnitude of a length is as likely."""
    rng = random.Random(seed)
    least, most = data["least"], data["most"]

    def of(name: str) -> int:
        return round(math.exp(rng.uniform(math.log(least[name]), math.log(most[name]))))

    found = []
    while len(found) < number:
        model, trained = rng.choice(data["models"]), rng.choice(list(data["trained"]))
        lengths = {"prompt_tokens": of("prompt"), "completion_tokens": of("completion"), "k": of("k") // 2 * 2}
        cards = 1 if trained == "lora-4-bits" else rng.choice((1, 1, 2, 4, 8))
        reference = rng.choice((0, 1))
        arm = rng.choice(("stock", "stock-accumulate", "shared"))
        if lengths["prompt_tokens"] + lengths["completion_tokens"] <= model["positions"]:
            found.append(
                {"model": model["name"], "trained": trained, "arm": arm}
                | lengths
                | {"cards": cards, "reference": reference}
            )
    return found


def setup_of(choice: dict):
    """The `Setup` that a choice of the page stands for, without its arm."""
    k = choice["k"]
    return replace(
        TRAINED[choice["trained"]][1],
        prompt_tokens=choice["prompt_tokens"],
        max_completion_length=choice["completion_tokens"],
        num_generations=k,
        per_device_train_batch_size=k,
        beta=0.05 * choice["reference"],
        num_devices=choice["cards"],
        fully_sharded=choice["cards"] > 1,
    )


def page_peaks(data: dict, choice: dict) -> dict[str, float]:
    """Bytes of each phase by the page's sums, as `visualization/fit/sums.js` adds them up."""
    from experiments.plan.fit_curves import Regime, sizes_at
    from experiments.plan.sharding import spread

    model = next(each for each in data["models"] if each["name"] == choice["model"])
    lengths = choice["prompt_tokens"], choice["completion_tokens"], choice["k"]
    setup, weights = setup_of(choice), (model["largest_layer"], model["other_weights"])
    peaks = {}
    for phase, regimes in model["trained"][choice["trained"]][choice["arm"]].items():
        each = sizes_at([Regime(**regime) for regime in regimes], model["window"], lengths)
        for kinds in each if not choice["reference"] else ():
            kinds.pop("reference", None)
        peaks[phase] = max(sum(spread(setup, weights, 0, phase, kinds).values()) for kinds in each)
    return peaks


def planned_peaks(choice: dict) -> dict[str, int]:
    from experiments.plan import extrapolate
    from experiments.workload.models import named_config

    with quiet():
        peaks = extrapolate.phase_peaks(setup_of(choice).arm(choice["arm"]), named_config(choice["model"]))
    return {peak.phase: peak.total for peak in peaks}


def row_of(choice: dict, data: dict) -> dict:
    planned, page = planned_peaks(choice), page_peaks(data, choice)
    sizes = {f"{phase}_planned_bytes": planned[phase] for phase in PHASES}
    return choice | sizes | {f"{phase}_page_bytes": round(page[phase]) for phase in PHASES} | {"code": data["code"]}


def apart(row: dict) -> float:
    """The largest relative difference of a phase."""
    return max(abs(int(row[f"{phase}_page_bytes"]) / int(row[f"{phase}_planned_bytes"]) - 1) for phase in PHASES)


def rows_there(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(args: argparse.Namespace) -> int:
    for name in ("choices", "processes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not PAGE.exists():
        raise ConfigError(f"{PAGE} is missing; make it with python -m experiments.plan.fit_data")
    data = json.loads(PAGE.read_text())
    use_fork(ARMS["shared"])
    wanted = choices(data, args.choices)
    texts = [tuple(str(choice[name]) for name in CHOICE) for choice in wanted]
    there = {tuple(row[name] for name in CHOICE): row for row in rows_there(TABLE) if row["code"] == data["code"]}
    rows = {text: there[text] for text in texts if text in there}
    missing = [choice for choice, text in zip(wanted, texts, strict=True) if text not in rows]
    print(f"{len(rows)} of {len(wanted)} choices are there", flush=True)
    try:
        for row, left in in_processes(partial(row_of, data=data), missing, args.processes):
            rows[tuple(str(row[name]) for name in CHOICE)] = row
            with TABLE.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows[text] for text in texts if text in rows)
            what = ", ".join(str(row[name]) for name in CHOICE)
            print(f"{len(rows)} of {len(wanted)}: {what}: {apart(row):.3%}; about {left:.0f} min left", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted with {len(rows)} of {len(wanted)} choices; the same command goes on", file=sys.stderr)
        return 130
    worst = max(rows.values(), key=apart)
    print(f"{len(rows)} choices: {apart(worst):.3%} apart at most")
    if apart(worst) > MOST_APART:
        raise ConfigError(f"{ {name: worst[name] for name in CHOICE} } is {apart(worst):.1%} apart; more than 2 %")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.plan.fit_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--choices", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return exit_code("fit_check", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
