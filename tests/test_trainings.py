"""Cells of real shapes at small size: what each way to train is, what is measured of it, and what it leaves."""

import gc
from dataclasses import replace

import pytest

from experiments.bench import trainings
from experiments.bench.samples import Cell
from experiments.bench.trainings import Trained, given
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


def test_given_completions_are_the_same_for_every_way_and_ragged_ones_differ_in_length():
    class Tokenizer(list):
        eos_token_id = 3

    cell, tokenizer = Cell("tiny-qwen3/ragged", 48, 100, 8), Tokenizer(range(500))
    ragged = given(cell, tokenizer, 1)
    assert ragged == given(cell, tokenizer, 1) != given(cell, tokenizer, 2)
    assert min(map(len, ragged)) == 25 and max(map(len, ragged)) == 100 and len({len(x) for x in ragged}) == 8
    assert all(x[-1] == 3 and 3 not in x[:-1] for x in ragged)
    assert {len(x) for x in given(replace(cell, model="tiny-qwen3/given"), tokenizer, 1)} == {100}
