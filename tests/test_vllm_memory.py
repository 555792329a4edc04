"""What vLLM takes of the device, as planner, doctor and launcher count it. vLLM itself is not here:
tests/with_vllm trains with it."""

from dataclasses import replace

import pytest

from rloo_memory.errors import ConfigError
from rloo_memory.models import named_config
from rloo_memory.plan import doctor
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.peaks import VLLM
from rloo_memory.plan.predict import predict
from rloo_memory.plan.setups import Setup, check
from rloo_memory.sizes import GIB

LENGTHS = dict(prompt_tokens=64, max_completion_length=4096, num_generations=8, per_device_train_batch_size=1,
               steps_per_generation=8, gradient_accumulation_steps=8)  # fmt: skip


def peaks(**more):
    """Of a model whose cache is larger than its logits."""
    config = named_config("qwen3-0.6b")
    config.vocab_size, config.num_hidden_layers, config.layer_types = 1000, 4, config.layer_types[:4]
    return {peak.phase: peak for peak in predict("this", Setup(**LENGTHS, **more), config).phases}


@pytest.fixture(scope="module")
def own():
    """Where transformers generates: eight completions of 4,096 tokens, one of them trained on at a time."""
    return peaks()


def test_a_cache_that_vllm_has_is_not_the_trainers(own):
    server = peaks(use_vllm=True, vllm_mode="server", device_memory=24 * GIB)
    assert max(own, key=lambda name: own[name].total) == "generate"
    assert set(server["generate"].kinds) == {"parameters", "reference", "optimizer state"}
    others = own.keys() - {"generate"}
    assert {name: server[name] for name in others} == {name: own[name] for name in others}


@pytest.mark.parametrize("sleeps, phases", [
    (False, {"load", "generate", "score", "train", "optimizer"}), (True, {"load", "generate"}),
])  # fmt: skip
def test_a_colocated_engine_has_its_share_of_the_device(own, sleeps, phases):
    share = dict(vllm_gpu_memory_utilization=0.25, vllm_enable_sleep_mode=sleeps, device_memory=24 * GIB)
    server = peaks(use_vllm=True, vllm_mode="server")
    found = peaks(use_vllm=True, **share)
    more = {name: found[name].total - server[name].total for name in found}
    assert more == {name: 6 * GIB if name in phases else 0 for name in found}
    assert found["generate"].kinds[VLLM] == 6 * GIB
    # it neither comes nor goes: the allocator wastes nothing of it
    assert Room(0, 0.5).needed([found["generate"]]) == Room(0, 0.5).needed([server["generate"]]) + 6 * GIB


def test_a_share_below_the_weights_is_refused_with_the_least_one():
    config = named_config("qwen3-8b")
    setup = Setup(64, lora_rank=16, use_vllm=True, vllm_gpu_memory_utilization=0.05, device_memory=79 * GIB)
    with pytest.raises(ConfigError, match=r"0.05 is 3.95 GiB here, .* alone are 15.26; set at least 0.20"):
        check(setup, config)
    two = dict(vllm_gpu_memory_utilization=0.1, vllm_tensor_parallel_size=2)
    for fits in (dict(vllm_gpu_memory_utilization=0.2), two, dict(vllm_mode="server"), dict(device_memory=0)):
        check(replace(setup, **fits), config)
    with pytest.raises(ConfigError, match="let a server generate"):
        check(replace(setup, device_memory=12 * GIB), config)


def test_the_planner_and_the_doctor_say_so(planned, capsys, tmp_path):
    said = "vLLM's share, 0.5 of the device, 4.00 GiB, is in it throughout"
    (tmp_path / "profile.yaml").write_text("use_vllm: true\nbeta: 0.0\nvllm_gpu_memory_utilization: 0.5\n")
    words = f"--model tiny-qwen3 --profile {tmp_path}/profile.yaml --prompt 64 --completion 16 --device-memory 8GiB"
    result = planned(*words.split(), "--arms", "stock")
    assert said in result.stdout and "vLLM 4.00" in result.stdout, result.stderr
    assert doctor.main([*words.split(), "--output", str(tmp_path / "fits.yaml")]) == 0
    assert said in capsys.readouterr().out
