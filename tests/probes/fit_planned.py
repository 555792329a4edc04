"""What the planner says at choices of docs/fit.html, a JSON list of rows of results/plans/fit_check.csv."""

import json
import sys

from experiments.builds import use_fork
from experiments.config import ARMS

use_fork(ARMS["shared"])

from experiments.plan.fit_check import planned_peaks  # noqa: E402

choices = [
    row | {name: int(row[name]) for name in ("prompt_tokens", "completion_tokens", "k", "cards", "reference")}
    for row in json.loads(sys.argv[1])
]
print(json.dumps([planned_peaks(choice) for choice in choices]))
