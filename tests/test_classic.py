"""The classic arms: what each one does to the data, and that the lean one trains exactly as the untouched one."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["classic-lean", "classic-string-exact"])
def test_lean_and_exact_string_train_as_the_baseline_step_by_step(train, arm):
    """Rewards, KL, loss and gradient norm of every step, of two prompts each, same seed, sampling on, in float64.

    Loss and KL are differences of nearly equal numbers: below 1e-9 they are rounding. That is not 1e-15: `generate`
    hands out logits in float32, and Adam carries what differs on.
    """
    options = ("--batch", "8", "--steps", "3", "--learning-rate", "1e-3", "--precision", "float64")
    baseline, record = (train(name, 4, *options)[1] for name in ("classic-baseline", arm))
    assert baseline["status"] == "ok" and len(baseline["trace"]) == 3 and record["fork_patches"]
    assert any(abs(step["loss"]) > 1e-3 for step in baseline["trace"]), "nothing was learned: the test would be empty"
    for expected, step in zip(baseline["trace"], record["trace"], strict=True):
        for name in ("reward", "kl", "loss", "grad_norm"):
            assert step[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), (step, expected)


@pytest.mark.parametrize("arm", ["classic-string", "classic-string-exact", "classic-lean"])
def test_published_string_repeat_mixes_two_prompts_and_the_others_do_not(probe, tmp_path, arm):
    """With a reward that depends on the prompt alone, leave-one-out leaves no advantage and so no gradient."""
    result = probe("advantages", arm, tmp_path)
    if arm == "classic-string":
        assert result["order"] in ("aabb", "bbaa")
        assert result["grad_norm"] > 1e-3
    else:
        assert result["order"] in ("abab", "baba")
        assert result["grad_norm"] < 1e-6


def test_lean_scores_gradients_and_samples_are_upstreams_on_padded_rows(probe):
    errors = probe("lean_exactness")
    assert errors["scored"] < 1e-12 and errors["tokens"] == 0
    assert errors["generated"] <= 2e-6, "one log-softmax of the same logits, which `generate` converts to float32"


@pytest.mark.slow
def test_published_string_repeat_cuts_at_1024_tokens_silently(train):
    options = ("--prompt-tokens", "1200", "--completion-tokens", "4", "--steps", "1")
    cut = train("classic-string", 2, *options)[1]
    whole = train("classic-string-exact", 2, *options)[1]
    assert cut["prompt_tokens_requested"] == 1200 and cut["prompt_tokens_fed_max"] == 1024
    assert 1198 <= whole["prompt_tokens_fed_min"] <= whole["prompt_tokens_fed_max"] <= 1200
    assert cut["status"] == whole["status"] == "ok"  # nothing tells the user
