"""What `rloo_memory.plan.ask` does in its own process; the question is in a file."""

import json
import sys
from pathlib import Path

from rloo_memory.errors import exit_code
from rloo_memory.plan import ask
from rloo_memory.plan.options import quiet

with quiet():
    sys.exit(exit_code("plan", ask.answer, json.loads(Path(sys.argv[1]).read_text())))
