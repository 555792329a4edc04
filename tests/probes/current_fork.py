"""The fork with prefix sharing, on the path: imported before anything of TRL."""

from experiments.arms import ARMS
from experiments.builds import use_fork

use_fork(ARMS["shared"])
