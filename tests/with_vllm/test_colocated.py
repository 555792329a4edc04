"""vLLM in the trainer's process."""

import pytest
import vllm_on_cpu
from comparison import faults
from launching import check_trained, launch
from tools import parsed
from training import CASES, train

COLOCATED = [
    "rloo", "grpo", "rloo, LoRA", "grpo, LoRA", "rloo, parts of groups", "grpo, parts of groups", "rloo, beta",
    "grpo, beta", "grpo, ratios truncated", "grpo, ratios not corrected", "grpo, two iterations", "grpo, token budget",
    "grpo, evaluation",
]  # fmt: skip


# Falcon H1 has attention and a Mamba-2 state in each layer
ON_MODELS = [*(("qwen3", name) for name in COLOCATED), ("falcon_h1", "rloo"), ("falcon_h1", "grpo, parts of groups")]


@pytest.mark.parametrize("model, name", ON_MODELS)
def test_sharing_trains_the_same(model, name, request, trl):
    off, on = (train(CASES[name], sharing, request.getfixturevalue(model)) for sharing in (False, True))
    assert not faults(off, on)


@pytest.mark.parametrize("name", ["rloo, images", "grpo, images, LoRA"])
def test_sharing_trains_the_same_on_images(name, gemma3, trl):
    """vLLM puts each image of Gemma 3 into the prompt once more: TRL hands it ids that have the image's tokens
    already. Its log-probabilities are those of another prompt then, with sharing and without."""
    off, on = (train(CASES[name], sharing, gemma3) for sharing in (False, True))
    assert not faults(off, on, log_probabilities=1.0)


@pytest.mark.parametrize("name", ["grpo", "grpo, ratios truncated"])
def test_ratios_to_an_engine_of_16_bits_are_the_same(name, qwen3, trl, monkeypatch):
    """Its log-probabilities are off by its rounding, and the ratios correct for that. Of one rollout: behind updates,
    weights that are 1e-6 apart can be one step apart in 16 bits."""
    monkeypatch.setitem(vllm_on_cpu.ENGINE, "dtype", "bfloat16")
    off, on = (train(CASES[name], sharing, qwen3, max_steps=1) for sharing in (False, True))
    assert not faults(off, on, log_probabilities=0.1)
    assert min(off.apart) > 1e-3


def test_sharing_trains_the_same_on_turns_with_tools(qwen3, trl, monkeypatch):
    import trl.trainer.grpo_trainer as module

    said = []

    def parse(*args, **more):
        said.append(parsed(*args, **more))
        return said[-1]

    monkeypatch.setattr(module, "parse_response", parse)
    off, on = (train(CASES["grpo, tools"], sharing, qwen3) for sharing in (False, True))
    assert not faults(off, on)
    assert sum("tool_calls" in message for message in said) > 6


def test_the_launcher_trains_with_it(qwen3, tmp_path):
    code, said = launch(qwen3, tmp_path, "--vllm_mode", "colocate")
    check_trained(code, said, tmp_path / "out")
    assert "use_vllm: what vLLM keeps on a CPU comes on top" in said
