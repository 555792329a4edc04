"""The doctor's changes: as settings and back, and which of them train the same."""

from types import SimpleNamespace

import pytest

from rloo_memory.plan.levers import LEVERS, SHARING, applied
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import changes, from_settings, with_changes
from rloo_memory.settings import profiles


@pytest.mark.slow
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
    whole = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=16, steps_per_generation=16)
    part = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=4, steps_per_generation=8)
    assert SHARING.exact(whole) and not SHARING.exact(part)
    assert "trains differently" in SHARING.effect(part) and "token ratio" in SHARING.effect(part)


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
def test_an_update_depends_on_its_micro_batches_for_the_settings_that_are_said_to(probe):
    """Of every loss and the terms beside it, in untouched code: an update of 8 together against 8 of one each."""
    result = probe("settings_by_batch")
    assert len(result) == 16 and all(0 <= distance < 2 for _, distance, _ in result)
    wrong = [case for case in result if (case[1] > 1e-4) != bool(case[2]) or 1e-5 < case[1] < 1e-4]
    assert not wrong and 5 < sum(bool(reasons) for *_, reasons in result) < 12


OWN = {
    "algorithm": "grpo", "model_init_kwargs": {"dtype": "float32", "revision": "main"}, "num_generations": 6,
    "per_device_train_batch_size": 12, "steps_per_generation": 2, "lora_dropout": 0.3, "loss_type": "bnpo",
    "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True, "use_bnb_nested_quant": True,
    "optim": "adamw_bnb_8bit", "tokens_per_forward": 4000, "num_iterations": 3, "learning_rate": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("profile", ["own", *profiles.names()])
def test_settings_come_back_from_a_setup_as_they_were(profile):
    own = OWN if profile == "own" else profiles.load_profile(profile)
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
