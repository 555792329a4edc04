"""The launcher on a host that has 16 MiB left."""

import sys

from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import gate

gate.available_bytes = lambda device: 2**24
sys.exit(launch.main())
