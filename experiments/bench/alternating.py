"""The samples of one cell: its ways by turns."""

import time
import traceback

from experiments.arms import ARMS
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import OUT_OF_MEMORY, Cell, Samples
from experiments.builds import use_fork
from experiments.measuring import Place
from rloo_memory.device import is_out_of_memory
from rloo_memory.models import typed_line


def measure(name: str, cell: Cell, ways: tuple[str, ...], repeats: tuple[int, int], here: Place) -> None:
    """Take the missing samples of a cell, or those until the device answers no more. What a way raises is its
    outcome."""
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
            return


def answers(device: str) -> bool:
    import torch

    try:
        return torch.ones(1, device=device).sum().item() == 1
    except RuntimeError:
        return False
