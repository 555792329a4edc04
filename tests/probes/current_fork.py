"""The fork with prefix sharing, on the path: imported before anything of TRL."""

from experiments.builds import use_fork
from rloo_memory.arms import ARMS

use_fork(ARMS["shared"])
