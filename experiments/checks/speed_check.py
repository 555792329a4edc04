"""How many times faster sharing was beside what the planner predicts of it: results/plans/speed_check.csv.

    python -m experiments.checks.speed_check [--machine NAME]

The measured ones are of the bench's measurement `worth`.
"""

import sys
from dataclasses import replace
from itertools import product

import pandas

from experiments.bench.random_models import config_of
from experiments.config import ROOT
from experiments.run_options import Parser
from rloo_memory.errors import program
from rloo_memory.plan.predict import predict_all
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.speed import PHASES, ratios

TABLE = ROOT / "results" / "plans" / "speed_check.csv"


class OfCompletions(Setup):
    """As the bench scores them, and TRL on a GPU: TRL on a CPU takes the tokens of prompts, too."""

    @property
    def positions_to_score(self) -> int:
        return self.max_completion_length


def setups_of(prompt: int, completion: int, k: int) -> dict[str, Setup]:
    """By the bench's names."""
    whole = OfCompletions(
        prompt, completion, k, k, dtype="float32", bf16=False, beta=0, padded=False, device="cpu", optim="adamw_torch"
    )
    shared = replace(whole, prefix_sharing=True)
    return {"whole": whole, "shared": shared, "shared-micro-2": shared.with_rows(2)}


def rows_of(measured: pandas.DataFrame) -> list[dict]:
    rows = []
    index = ["model", "prompt_tokens", "completion_tokens", "k"]
    for cell, of_cell in measured.groupby(index):
        model, *lengths = cell
        predictions = predict_all(setups_of(*map(int, lengths)), config_of(model), lambda line: None)
        whole, *ways = predictions
        medians = of_cell.set_index(["way", "metric"])["median"]
        for way, phase in product(ways, PHASES):
            metric = f"{phase}_seconds"
            if (way.arm, metric) not in medians:
                continue
            low, high = ratios(way, [whole], phase)
            rows.append(
                dict(zip(index, cell, strict=True))
                | {"way": way.arm, "phase": phase, "measured": medians["whole", metric] / medians[way.arm, metric]}
                | {"predicted_low": low, "predicted_high": high}
            )
    return rows


def table_of(machine: str) -> pandas.DataFrame:
    bench = pandas.read_csv(ROOT / "results" / machine / "bench.csv")
    rows = rows_of(bench[bench.measurement == "worth"])
    return pandas.DataFrame(rows).sort_values(["model", "phase"], ignore_index=True).round(3)


@program("speed_check")
def main(argv: list[str] | None) -> int:
    parser = Parser("checks.speed_check", __doc__, place=False)
    parser.add_argument("--machine", default="reference-cpu-2-cores", help="folder of results/ with the bench's CSV")
    table = table_of(parser.parse_args(argv).machine)
    table.to_csv(TABLE, index=False)
    print(table.round(2).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
