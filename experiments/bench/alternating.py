"""The samples of one cell: its ways by turns, in a process of its own."""

import multiprocessing
import sys
import time
import traceback

from experiments.arms import ARMS
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import Cell, Samples
from experiments.builds import use_fork
from experiments.measuring import Place
from experiments.processes import end_with
from rloo_memory.device import is_out_of_memory
from rloo_memory.errors import EXIT_TIME, exit_code
from rloo_memory.models import typed_line

OUT_OF_MEMORY = "out of memory"


def in_its_own_process(name: str, cell: Cell, ways, repeats, here: Place) -> int:
    """What `measure` returns there, or the exit code that ended it: what one cell leaves in memory would count in the
    next."""
    process = multiprocessing.get_context("spawn").Process(
        target=measured, args=(name, cell, ways, repeats, here), daemon=True
    )
    process.start()
    process.join()
    return process.exitcode


def measured(*args) -> None:
    end_with(multiprocessing.parent_process().pid)
    sys.exit(exit_code("bench", lambda args: measure(*args), args))


def measure(name: str, cell: Cell, ways: tuple[str, ...], repeats: tuple[int, int], here: Place) -> int:
    """Take the missing samples of a cell."""
    use_fork(ARMS["shared"])
    samples, subject = Samples(here.folder, name, here.facts), MEASUREMENTS[name].start(cell, ways, here)
    while missing := samples.missing(cell, ways, *repeats):
        repeat, way = missing[0]
        begun, values, failure = time.monotonic(), {}, ""
        try:
            values = subject.sample(way)
        except Exception as error:  # whatever a trainer or a kernel raises is the way's outcome
            failure = f"{OUT_OF_MEMORY if is_out_of_memory(error) else 'failed'}: {typed_line(error)}"
            if not is_out_of_memory(error):
                traceback.print_exc()
        samples.add(cell, way, repeat, values, failure)
        print(f"  {way}, {repeat + 1}: {failure or f'{time.monotonic() - begun:.1f} s'}", flush=True)
        if failure and not answers(here.device):
            print("the device no longer answers this process; the same command goes on from here", flush=True)
            return EXIT_TIME
    return 0


def answers(device: str) -> bool:
    """After an illegal access a GPU answers nothing more in the same process."""
    import torch

    try:
        return torch.ones(1, device=device).sum().item() == 1
    except RuntimeError:
        return False
