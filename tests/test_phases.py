"""Phase marks and exact peaks, on this process."""

import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.checks.setup_trainer import CountedHighWater
from experiments.run_device import read_weights
from rloo_memory.device import status_bytes
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.simulation.live_bytes import LiveBytes

MIB = 2**20


@pytest.fixture
def recorder(tmp_path):
    recorder = PhaseRecorder(tmp_path / "phases.csv", "cpu")
    if not recorder.high_water.can_reset:
        pytest.skip("this kernel does not let a process reset its high-water mark")
    return recorder


def test_a_peak_between_two_samples_is_kept_and_stays_in_its_phase(recorder):
    """64 MiB alive for an instant in one phase: the mark shows it there and in no other phase."""
    recorder.enter("generate")
    recorder.enter("train")
    level = status_bytes("VmRSS")
    # Pages of their own: what malloc gives may be resident already, where earlier tests freed as much
    with mmap.mmap(-1, 64 * MIB) as block:
        block[::4096] = b"x" * (len(block) // 4096)
    recorder.enter("optimizer")
    recorder.close()
    peaks = {peak.phase: peak.peak_resident_bytes for peak in recorder.peaks}
    assert peaks["train"] >= level + 60 * MIB
    assert peaks["optimizer"] < peaks["train"] - 40 * MIB
    assert peaks["generate"] < peaks["train"] - 40 * MIB


@pytest.mark.parametrize("lora", (False, True))
def test_a_prompt_computed_before_generate_belongs_to_generation(recorder, lora):
    """As prefix sharing does it: a forward of the prompt, `generate`, then scoring, each without gradients. With LoRA
    the prompt and `generate` go through the base model, the rest through both."""
    model = policy = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen = []
    model.register_forward_hook(lambda *args: seen.append((recorder.step, recorder.phase)))
    if lora:
        policy = get_peft_model(model, LoraConfig(target_modules=["0"]))
        assert policy.get_base_model() is model
    policy.generate = lambda input_ids: model(input_ids)
    optimizer = torch.optim.SGD(policy.parameters())
    recorder.attach(policy, optimizer)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1, 2))
            policy.generate(input_ids=torch.ones(1, 2))
            policy(torch.ones(1, 2))
        policy(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    rollout = ("generate", "generate", "score", "train")
    assert seen == [(step, phase) for step in (1, 2) for phase in rollout]
    assert len(recorder.rollout_starts) == 2


def test_a_cache_that_outlives_generate_is_no_part_of_scoring(tmp_path):
    """As prefix sharing holds it, which makes it before `generate`."""
    recorder = PhaseRecorder(tmp_path / "phases.csv", "cpu")
    recorder.high_water = CountedHighWater(LiveBytes())
    policy, reference = (torch.nn.Linear(2, 2) for _ in range(2))
    policy.generate = lambda input_ids, cache: cache.append(torch.zeros(MIB))
    recorder.attach(policy, torch.optim.SGD(policy.parameters()))
    with recorder.high_water.memory:
        caches = []
        policy.generate(torch.ones(1, 2), caches)
        caches.clear()
        with torch.no_grad():
            reference(torch.ones(MIB // 8, 2))
        policy(torch.ones(1, 2))
    peaks = {peak.phase: peak.peak_allocated_bytes for peak in recorder.peaks}
    assert peaks["generate"] >= 4 * MIB > 3 * MIB > peaks["score"] >= MIB


def test_weights_are_resident_before_the_start_level(tmp_path):
    """Of a checkpoint of 32 MiB, whose file is mapped."""

    def resident() -> int:
        """MiB of the mapped file."""
        (part,) = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/model.safetensors\n")[1:2]
        return int(re.search(r"^Rss: +(\d+) kB", part, re.M)[1]) >> 10

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=2**17, **sizes, tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert resident() < 20
    read_weights(SimpleNamespace(name="a trainer", ref_model=model))
    assert resident() >= 32
