"""The comparison finds faults that are put in on purpose."""

import pytest
from comparison import faults
from training import CASES, train
from transformers import TrainerCallback

from rloo_memory.prefix_sharing.routing import ReadPrefix


@pytest.fixture(scope="module")
def off(qwen3, trl):
    return train(CASES["grpo"], False, qwen3)


def test_an_engine_that_gets_no_weights(off, qwen3, trl):
    def keep_weights(trainer):
        trainer.vllm_generation.sync_weights = lambda: None

    kept = train(CASES["grpo"], True, qwen3, keep_weights)
    assert any(fault.startswith("on: vLLM's log-probabilities") for fault in faults(off, kept))


def test_completions_one_position_too_far(off, qwen3, trl, monkeypatch):
    init = ReadPrefix.__init__

    def further(self, prefix, positions, *rest):
        init(self, prefix, positions + 1, *rest)

    class AfterTheFirstStep(TrainerCallback):  # before it, `share_prompts` compares with whole rows itself
        def on_step_end(self, *args, **kwargs):
            monkeypatch.setattr(ReadPrefix, "__init__", further)

    def spoil(trainer):
        trainer.add_callback(AfterTheFirstStep)

    found = faults(off, train(CASES["grpo"], True, qwen3, spoil))
    assert any(fault.startswith("parameters") for fault in found)
    assert any(fault.startswith("on: vLLM's log-probabilities") for fault in found)


def test_sharing_that_is_off(off):
    assert faults(off, off) == ["0 passes shared prompts with sharing, 0 without"]
