"""What `experiments.plan.ask` does in its own process; the question is in a file."""

import json
import sys
from pathlib import Path

from experiments.config import exit_code
from experiments.plan import ask
from experiments.plan.options import quiet

with quiet():
    sys.exit(exit_code("plan", ask.answer, json.loads(Path(sys.argv[1]).read_text())))
