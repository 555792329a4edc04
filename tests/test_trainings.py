"""Cells of real shapes at small size: what each way to train is, what is measured of it, and what it leaves."""

import gc

import pytest

from experiments.bench import trainings
from experiments.bench.samples import Cell
from experiments.bench.trainings import Trained
from experiments.measuring import Place

CELL = Cell("tiny-qwen3/sampled", 48, 8, 4)


@pytest.mark.torch
def test_every_phase_is_measured_and_nothing_of_a_trainer_stays(tmp_path, shared_fork, monkeypatch):
    import torch
    from transformers import PreTrainedModel

    subject, alive = Trained(CELL, ("stock",), Place("cpu", tmp_path, {})), []

    def or_out_of_memory(completions, **kwargs):
        """As it is raised, in the middle of a training."""
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        if len(alive) == trainings.STEPS + 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB\nmore")
        return [float(len(text)) for text in completions]

    monkeypatch.setattr("rloo_memory.data.letter_reward", or_out_of_memory)
    for way in ("stock", "stock-accumulate", "shared-micro-2"):
        if way == "stock-accumulate":
            with pytest.raises(torch.OutOfMemoryError):
                subject.sample(way)
            continue
        values = subject.sample(way)
        assert all(values[f"{phase}_seconds"] > 0 for phase in trainings.PHASES)
        assert all(values[f"{phase}_resident_bytes"] > 2**20 for phase in trainings.PHASES)
        assert values["step_seconds"] == pytest.approx(sum(values[f"{phase}_seconds"] for phase in trainings.PHASES))
        assert "train_allocated_bytes" not in values, "a CPU has no such counter"
    assert alive[3] == alive[4], "nothing of a trainer that ran out of memory stays for the next one"
