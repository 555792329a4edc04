"""The doctor's changes: as settings and back, and which of them train the same."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rloo_memory.plan.levers import LEVERS, applied
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import by_batch, changes, from_settings, with_changes
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
@pytest.mark.parametrize(
    "own, experts",
    [
        ({"loss_type": "bnpo"}, None),
        ({"top_entropy_quantile": 0.2}, None),
        ({"entropy_coef": 0.01}, None),
        ({"use_adaptive_entropy": True}, None),
        ({}, 0.001),  # the model's own coefficient
        ({"algorithm": "rloo", "router_aux_loss_coef": 0.1}, 0.0),
    ],
)
def test_other_micro_batches_train_differently_where_an_update_depends_on_them(own, experts):
    own = {"algorithm": "grpo", **own}
    config = SimpleNamespace(get_text_config=lambda: config, max_position_embeddings=10**6)
    if experts is not None:
        config.output_router_logits, config.router_aux_loss_coef = False, experts
    sharing, fewer, one = (next(x for x in LEVERS if x.name.startswith(name)) for name in ("pre", "steps", "one "))
    batches = [(8, 1, False), (8, 2, False), (2, 4, False), (2, 4, True), (8, 1, True)]
    exact = {}
    for kind, asked in {"own": own, "off": {"router_aux_loss_coef": 0.0, "algorithm": own["algorithm"]}}.items():
        for batch, steps, shares in batches:
            setup = from_settings(100, asked, config, num_generations=8, per_device_train_batch_size=batch,
                                  gradient_accumulation_steps=steps, steps_per_generation=steps,
                                  prefix_sharing=shares)  # fmt: skip
            exact[kind, batch, steps, shares] = [lever.exact(setup) for lever in (sharing, one, fewer)]
    assert [exact["own", *batch][:2] for batch in batches[:4]] == [[True, False], *[[False, False]] * 3]
    assert exact["own", 8, 1, True][1] and not any(exact["own", *batch][2] for batch in batches)
    assert all(all(exact["off", *batch][:2]) for batch in batches)
    assert by_batch(own, config) and not by_batch({"algorithm": "grpo", "router_aux_loss_coef": 0.0}, config)


@pytest.mark.slow
@pytest.mark.torch
def test_an_update_depends_on_its_micro_batches_for_the_settings_that_are_said_to(probe):
    """Of every loss and the terms beside it, in untouched code: an update of 8 together against 8 of one each."""
    result = probe("settings_by_batch")
    assert len(result) == 16 and all(0 <= distance < 2 for _, distance, _ in result)
    wrong = [case for case in result if (case[1] > 1e-4) != bool(case[2]) or 1e-5 < case[1] < 1e-4]
    assert not wrong and 5 < sum(bool(reasons) for *_, reasons in result) < 12


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "algorithm": st.sampled_from(["rloo", "grpo"]),
        "beta": st.sampled_from([0.0, 0.01, 0.2]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "model_init_kwargs": st.sampled_from([{"dtype": "float32"}, {"revision": "main"}]),
        "bf16": st.sampled_from([True, False, None]),
        "fp16": st.booleans(),
        "num_generations": st.sampled_from([2, 4, 6]),
        "per_device_train_batch_size": st.sampled_from([1, 4, 12, 24]),
        "gradient_accumulation_steps": st.sampled_from([1, 6, 12]),
        "steps_per_generation": st.sampled_from([1, 12, 24]),
        "generation_batch_size": st.sampled_from([24, 48]),
        "use_peft": st.booleans(),
        "lora_r": st.sampled_from([4, 32]),
        "lora_target_modules": st.sampled_from([["q_proj", "v_proj"], "all-linear", ["all-linear"], None]),
        "lora_dropout": st.sampled_from([0.0, 0.05, 0.3]),
        "load_in_4bit": st.booleans(),
        "load_in_8bit": st.booleans(),
        "use_bnb_nested_quant": st.booleans(),
        "gradient_checkpointing": st.booleans(),
        "optim": st.sampled_from(["adamw_torch", "sgd", "adamw_bnb_8bit"]),
        "prefix_sharing": st.booleans(),
        "tokens_per_forward": st.sampled_from([4000, None]),
        "max_completion_length": st.sampled_from([64, 1000]),
        "num_iterations": st.sampled_from([1, 3]),
        "loss_type": st.sampled_from(["grpo", "bnpo"]),
        "prompt_tokens": st.just(99),
        "learning_rate": st.floats(1e-7, 1e-3),
        "warmup_steps": st.integers(0, 5),
        "temperature": st.floats(0.1, 2.0),
    },
)


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
