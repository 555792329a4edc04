"""What is said of the doctor's changes: which of them train the same."""

from types import SimpleNamespace

import pytest

from experiments.plan.levers import LEVERS
from experiments.plan.setups import Setup
from experiments.plan.trl_settings import by_batch, from_settings, of_model


@pytest.mark.slow
@pytest.mark.torch
def test_levers_that_are_said_to_train_the_same_do(probe):
    """Weights after one update on given completions, in float32. Activations are offloaded on a GPU only."""
    result = probe("exact_levers")
    assert result.pop("half the completion") > 0.1 and result.pop("steps_per_generation of two updates") > 0.1
    assert result.pop("said to be exact") == [False] and result.pop("update") > 1e-3
    shown = {name.partition(" of ")[0] for name in result}
    assert {"prefix_sharing of parts", "one completion a pass of shared parts"} <= result.keys()
    exact = {lever.name for lever in LEVERS if lever.same}
    assert shown == exact - {"activation_offloading"}
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
            setup = from_settings(100, asked, num_generations=8, per_device_train_batch_size=batch,
                                  gradient_accumulation_steps=steps, steps_per_generation=steps,
                                  prefix_sharing=shares)  # fmt: skip
            setup = of_model(setup, asked, config)
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
