"""`python -m experiments.train ...`, where torch is imported already."""

import sys

from experiments.train import main

sys.exit(main())
