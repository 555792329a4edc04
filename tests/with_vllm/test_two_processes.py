"""vLLM in each of two processes, which train as one: DDP and FSDP2."""

import os
import sys
from pathlib import Path

import torch
import two_processes
from comparison import faults

HERE = Path(__file__).resolve().parent


def test_sharing_trains_the_same(qwen3, tmp_path):
    names = ("grpo, DDP", "rloo, DDP, parts of groups", "grpo, FSDP2")
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "train_cases.py")]
    path = os.pathsep.join(map(str, (HERE, HERE.parent / "probes", HERE.parents[1])))
    command = [sys.executable, *program, str(tmp_path / "done.pt"), str(qwen3), *names]
    code, said = two_processes.run(command, PYTHONPATH=path)
    assert code == 0, said[-3000:]
    done = torch.load(tmp_path / "done.pt", weights_only=False)
    assert [done[name][0].kind for name in names] == ["FSDP" if "FSDP" in name else "MULTI_CPU" for name in names]
    assert {name: faults(*done[name]) for name in names} == {name: [] for name in names}
