"""Trains cases without and with sharing, on as many processes as torchrun starts. The first writes FILE.

torchrun --nproc-per-node 2 train_cases.py FILE MODEL CASE...
"""

import os
import sys
from pathlib import Path

import torch
import vllm_on_cpu
from training import CASES, train

from rloo_memory.errors import leave

vllm_on_cpu.colocated()
vllm_on_cpu.name_shared_memory()
file, model, *names = sys.argv[1:]
done = {name: [train(CASES[name], sharing, Path(model)) for sharing in (False, True)] for name in names}
if os.environ["RANK"] == "0":
    torch.save(done, file)
torch.distributed.barrier()
vllm_on_cpu.remove_shared_memory()
leave(0)
