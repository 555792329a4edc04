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

    subject, alive = Trained(CELL, (), Place("cpu", tmp_path, {})), []

    def out_of_memory_at_first(completions, **kwargs):
        """As it is raised, in the middle of a training."""
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB\nmore")
        return [float(len(text)) for text in completions]

    monkeypatch.setattr("rloo_memory.data.letter_reward", out_of_memory_at_first)
    with pytest.raises(torch.OutOfMemoryError):
        subject.sample("stock-accumulate")
    values = subject.sample("shared-micro-2")
    assert all(values[f"{phase}_seconds"] > 0 for phase in trainings.PHASES)
    assert all(values[f"{phase}_resident_bytes"] > 2**20 for phase in trainings.PHASES)
    assert values["step_seconds"] == pytest.approx(sum(values[f"{phase}_seconds"] for phase in trainings.PHASES))
    assert "train_allocated_bytes" not in values, "a CPU has no such counter"
    assert alive[0] == alive[1], "nothing of a trainer that ran out of memory stays for the next one"
