"""The planner's predictions of what will be measured, made beforehand: a GPU is not for predicting."""

import time
from pathlib import Path

from experiments.evidence.gpu.plans import Cell
from rloo_memory.storage import read_json, write_json


def read_peaks(path: Path | None) -> dict[str, dict[str, int]]:
    """`Cell.key` -> phase -> bytes, nothing where there is no such file."""
    found = read_json(path) if path is not None else None
    return found if isinstance(found, dict) else {}


def predict_cells(cells: list[Cell], path: Path, say=print) -> None:
    """Bring `path` to a prediction for each cell; those that are there are kept. Each is written when it is made."""
    from rloo_memory.plan.predict import predict

    known = read_peaks(path)
    missing = {cell.key: cell for cell in cells if cell.key not in known}
    begun = time.monotonic()
    for number, (key, cell) in enumerate(missing.items(), 1):
        known[key] = {peak.phase: peak.total for peak in predict(cell.way, cell.setup, cell.hf_config()).phases}
        write_json(path, known)
        say(f"  predicted {number} of {len(missing)}: {key}, {time.monotonic() - begun:.0f} s")
