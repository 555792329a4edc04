"""The fork with prefix sharing, on the path: imported before anything of TRL. `--released DIR` names another TRL."""

import sys

from experiments.arms import ARMS
from experiments.builds import use_fork

RELEASED = "--released" in sys.argv
if RELEASED:
    place = sys.argv.index("--released")
    sys.path.insert(0, sys.argv[place + 1])
    del sys.argv[place : place + 2]
else:
    use_fork(ARMS["shared"])
