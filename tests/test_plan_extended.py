"""The short cuts of the simulation, few layers and few passes, against whole simulations."""

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from rloo_memory import models
from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation import simulate

pytestmark = pytest.mark.slow


def setups():
    """By name: a setup, and the config of the model that it trains."""
    eight_layers = models.shape_config("qwen3-8-layers", 4000)
    deep = models.shape_config("qwen3-8-layers", 4000)
    deep.num_hidden_layers, deep.layer_types = 16, ["full_attention"] * 16
    # Three sliding layers and a full one, and one more at the end
    alternating = models.shape_config("gemma-3-1b", 4000)
    alternating.hidden_size, alternating.intermediate_size, alternating.head_dim = 256, 512, 64
    alternating.num_hidden_layers = 25
    alternating.layer_types = [("sliding_attention", "full_attention")[i % 4 == 3] for i in range(25)]
    alternating.sliding_window = 32
    two_kinds = extrapolate.with_layers(alternating, 2)
    two_kinds.layer_types, two_kinds.sliding_window = ["sliding_attention", "full_attention"], 512
    # A state in three of four layers, and one more at the end; in every layer
    states = models.shape_config("qwen3.5-8-layers", 4000)
    states.num_hidden_layers, states.layer_types = 25, (states.layer_types * 4)[:25]
    states_too = CONFIG_MAPPING["falcon_h1"](
        vocab_size=4000, hidden_size=128, intermediate_size=256, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=32,
    )  # fmt: skip
    # A tower before the layers, windows in some of its blocks
    sees = models.shape_config("qwen2.5-vl-8-layers")
    sees.text_config.vocab_size, sees.image_token_id = 4000, 3999
    # The first three layers get features of the tower
    sees_early = models.shape_config("qwen3-vl-8-layers")
    sees_early.text_config.vocab_size, sees_early.text_config.num_hidden_layers = 4000, 16
    sees_early.image_token_id, sees_early.video_token_id = 3999, 3998
    base = Setup(prompt_tokens=96, max_completion_length=16, num_generations=4, per_device_train_batch_size=4)
    many_passes = replace(base, device="cpu", max_completion_length=64).with_k(16)
    offloaded = replace(base, lora_rank=8, activation_offloading=True, max_completion_length=64)
    return {
        "shared-lora": (replace(base, lora_rank=8).with_shared_groups(), eight_layers),
        "passes": (many_passes.with_shared_groups(), extrapolate.with_layers(eight_layers, 2)),
        # 10 completions leave more for the last tile of the LM head than 8 and 40
        "passes-rest": (
            replace(many_passes, max_completion_length=768).with_k(40).with_shared_groups(),
            extrapolate.with_layers(eight_layers, 2),
        ),
        "alternating-shared": (base.with_shared_groups(), alternating),
        "states-shared": (base.with_shared_groups(), states),
        "states-in-every-layer": (base.with_shared_groups(), states_too),
        "images-shared": (replace(base, images=((112, 168), (56, 56))).with_k(12).with_shared_groups(), sees),
        "images-features-shared": (replace(base, images=((64, 96),)).with_shared_groups(), sees_early),
        # What is highest behind an event is another allocation with many passes than with few
        "passes-windows": (
            replace(base, prompt_tokens=400, max_completion_length=3000, lora_rank=8).with_k(64).with_shared_groups(),
            two_kinds,
        ),
        "stock-offloaded": (offloaded, deep),
        "passes-offloaded": (replace(offloaded, device="cpu").with_k(10).with_shared_groups(), deep),
    }


def operations_bytes_and_calls(work) -> list[float]:
    return [sum(times * each[i] for each, times in work.items()) for i in range(2)] + [work.total()]


def test_few_layers_and_few_passes_tell_what_many_take():
    """Byte for byte but for bookkeeping tensors."""
    on_host = set()
    for name, (setup, config) in setups().items():
        tasks = extrapolate.simulations(setup, config)
        assert len(tasks) > 1, f"{name}: nothing is extended"
        results = [extrapolate.simulate(*task) for task in tasks]
        simulation = simulate.Simulation(setup, config)
        whole = extrapolate.highest(simulation.run())
        for phase, short in extrapolate.work_of(setup, config, tasks, results).items():
            expected = operations_bytes_and_calls(simulation.work.counted[phase])
            assert operations_bytes_and_calls(short) == pytest.approx(expected, rel=5e-3), (name, phase)
        for peak in extrapolate.combine(setup, config, tasks, results):
            stretches = [kinds for place, kinds in whole.items() if place[0] == peak.phase]
            for found, count in ((peak.total, extrapolate.on_device), (peak.host, extrapolate.on_host)):
                assert abs(found - max(map(count, stretches))) <= 1024, (name, peak.phase)
            if peak.host:
                on_host.add((name, peak.phase))
    assert on_host == {("stock-offloaded", "train"), ("passes-offloaded", "train")}
