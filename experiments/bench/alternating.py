"""The samples of one cell: its ways by turns, in a process of its own."""

import multiprocessing
import sys
import time
import traceback

from experiments.arms import ARMS
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import OUT_OF_MEMORY, Cell, Samples
from experiments.builds import use_fork
from experiments.measuring import Place
from experiments.processes import end_with
from rloo_memory.device import is_out_of_memory
from rloo_memory.errors import exit_code
from rloo_memory.models import typed_line

NO_ANSWER = 6  # exit code of a process to which the device answers no more: another one goes on


def in_its_own_process(name: str, cell: Cell, ways, repeats, here: Place) -> int:
    """What `measure` returns there, or the exit code that ended it: what one cell leaves in memory would count in the
    next."""
    context, work = multiprocessing.get_context("spawn"), (name, cell, ways, repeats, here)
    process = context.Process(target=measured, args=work)  # no daemon: it may start processes, and ends with us
    process.start()
    process.join()
    return process.exitcode


def measured(*work) -> None:
    end_with(multiprocessing.parent_process().pid)
    sys.exit(exit_code("bench", lambda work: measure(*work), work))


def measure(name: str, cell: Cell, ways: tuple[str, ...], repeats: tuple[int, int], here: Place) -> int:
    """Take the missing samples of a cell. What a way raises is its outcome."""
    use_fork(ARMS["stock-compact"])  # on a CPU, too, whole rows have logits of completions alone
    samples, subject = Samples(here.folder, name, here.facts), MEASUREMENTS[name].start(cell, ways, here)
    while missing := samples.missing(cell, ways, *repeats):
        repeat, way = missing[0]
        begun, values, failure = time.monotonic(), {}, ""
        try:
            values = subject.sample(way)
        except Exception as error:
            failure = f"{OUT_OF_MEMORY if is_out_of_memory(error) else 'failed'}: {typed_line(error)}"
            traceback.print_exc()
        samples.add(cell, way, repeat, values, failure)
        samples.publish(cell, complete=False)
        print(f"  {way}, {repeat + 1}: {failure or f'{time.monotonic() - begun:.1f} s'}", flush=True)
        if failure and not answers(here.device):
            return NO_ANSWER
    return 0


def answers(device: str) -> bool:
    import torch

    try:
        return torch.ones(1, device=device).sum().item() == 1
    except RuntimeError:
        return False
