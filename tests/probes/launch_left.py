"""The launcher, which has left the group of its processes when it ends."""

import sys

import torch.distributed

from rloo_memory.launch import __main__ as launch

try:
    sys.exit(launch.main(sys.argv[1:]))
finally:
    assert not torch.distributed.is_initialized(), "a group is left, whose threads can abort this process"
