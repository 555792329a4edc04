"""The doctor's changes: as settings and back, and which of them train the same."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rloo_memory.plan.levers import LEVERS, applied
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import changes, from_settings, with_changes
from rloo_memory.settings import profiles


@pytest.mark.slow
@pytest.mark.torch
def test_levers_that_are_said_to_train_the_same_do(probe):
    """Weights after one update on given completions, in float32. Activations are offloaded, and vLLM sleeps, on a GPU
    only."""
    result = probe("exact_levers")
    assert result.pop("half the completion") > 0.1 and result.pop("steps_per_generation of two updates") > 0.1
    assert result.pop("said to be exact") == [False] and result.pop("update") > 1e-3
    shown = {name.partition(" of ")[0] for name in result}
    assert {"prefix_sharing of parts", "one completion a pass of shared parts"} <= result.keys()
    exact = {lever.name for lever in LEVERS if lever.same}
    assert shown == exact - {"activation_offloading", "vllm_enable_sleep_mode"}
    assert max(result.values()) < 1e-5, result


def test_sharing_is_the_same_only_if_an_update_has_whole_groups():
    sharing = LEVERS[0]
    whole = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=16, steps_per_generation=16)
    part = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=4, steps_per_generation=8)
    assert sharing.exact(whole) and not sharing.exact(part)
    assert "trains differently" in sharing.effect(part) and "token ratio" in sharing.effect(part)


@pytest.mark.torch
@pytest.mark.parametrize("own, experts", [({"loss_type": "bnpo"}, 0.0), ({}, 0.001)])  # the model's own coefficient
def test_other_micro_batches_train_differently_where_an_update_depends_on_them(own, experts):
    config = SimpleNamespace(output_router_logits=False, router_aux_loss_coef=experts)
    config.get_text_config = lambda: config
    batches = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4)
    for asked, same in ((own, False), ({"router_aux_loss_coef": 0.0}, True)):
        setup = from_settings(100, {"algorithm": "grpo", **batches, **asked}, config)
        levers = (lever for lever in LEVERS if lever.name in ("prefix_sharing", "one completion a pass"))
        assert [lever.exact(setup) for lever in levers] == [same, same]


@pytest.mark.slow
@pytest.mark.torch
def test_an_update_depends_on_its_micro_batches_for_the_settings_that_are_said_to(probe):
    """Of every loss and the terms beside it, in untouched code: an update of 8 together against 8 of one each."""
    result = probe("settings_by_batch")
    assert len(result) == 16 and all(0 <= distance < 2 for _, distance, _ in result)
    wrong = [case for case in result if (case[1] > 1e-4) != bool(case[2]) or 1e-5 < case[1] < 1e-4]
    assert not wrong and 5 < sum(bool(reasons) for *_, reasons in result) < 12


SOME = {
    "algorithm": ["rloo", "grpo"], "beta": [0.0, 0.2], "dtype": ["float32", "bfloat16"],
    "model_init_kwargs": [{"dtype": "float32"}, {"revision": "main"}], "bf16": [True, False, None],
    "fp16": [True, False], "num_generations": [2, 4, 6], "per_device_train_batch_size": [1, 4, 12, 24],
    "gradient_accumulation_steps": [1, 6, 12], "steps_per_generation": [1, 12, 24],
    "generation_batch_size": [24, 48], "use_peft": [True, False], "lora_r": [4, 32],
    "lora_target_modules": [["q_proj", "v_proj"], "all-linear", ["all-linear"], None], "lora_dropout": [0.0, 0.3],
    "load_in_4bit": [True, False], "load_in_8bit": [True, False], "use_bnb_nested_quant": [True, False],
    "gradient_checkpointing": [True, False], "optim": ["adamw_torch", "sgd", "adamw_bnb_8bit"],
    "prefix_sharing": [True, False], "tokens_per_forward": [4000, None], "max_completion_length": [64, 1000],
    "num_iterations": [1, 3], "loss_type": ["grpo", "bnpo"], "prompt_tokens": [99], "learning_rate": [1e-5],
}  # fmt: skip
SETTINGS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in SOME.items()})


def assert_there_and_back(own: dict) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=10**6))
    setup = from_settings(100, own)
    assert with_changes(own, changes(setup, setup)) == own
    for lever in LEVERS:
        if trial := applied(lever, setup, config):
            changed = changes(setup, trial)
            new = with_changes(own, changed)
            assert from_settings(100, new) == trial, lever.name
            left = {name: value for name, value in own.items() if name not in changed and name != "model_init_kwargs"}
            assert left.items() <= new.items(), lever.name


@pytest.mark.torch
@given(own=SETTINGS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_settings_come_back_from_a_setup_as_they_were(own):
    assert_there_and_back(own)


@pytest.mark.torch
def test_every_profile_comes_back_from_a_setup_as_it_was():
    for name in profiles.names():
        assert_there_and_back(profiles.load_profile(name))
    assert from_settings(100, {}).num_generations == 2, "as TRL has it, where a file says nothing"
