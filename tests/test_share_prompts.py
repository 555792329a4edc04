"""`share_prompts` on TRL as released: whole trainings, what is refused, told and left behind."""

import pytest
from releases import release

OTHERS = ("1.14.2", "1.15.0")  # releases, beside the one that is installed
OF_IMAGES = ("grpo internvl, two of 4",)


def check(runs, number):
    assert len(runs) == number
    for name, run in runs.items():
        assert "error" not in run, (name, run)
        assert run["logs"] <= 1e-9 and run["parameters"] <= 1e-9 and max(run["grad_norms"]) > 1e-3, (name, run)


@pytest.mark.sample
def test_trainings_are_the_same(probe):
    check(probe("shared_trainer", "grpo passes of 9"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_trainings_are_the_same_on_each_release(probe, version):
    runs = ("rloo two of 4 a micro-batch, lora", "rloo qwen3.5")  # test_prefix_sharing.py has all on the installed one
    check(probe("shared_trainer", *runs, "--released", release(version)), len(runs))
    check(probe("shared_images_trainer", *OF_IMAGES, "--released", release(version)), len(OF_IMAGES))


def test_what_does_not_fit_is_said_and_nothing_is_left(probe):
    found = probe("share_prompts")
    assert found["updates of README's program"] == 1
    assert found["shared"] < 0.5 * found["whole"], "tokens with gradients, of the same training"
    assert found["left"] == [] and found["forward is TRL's"] and found["left by a refusal"] == []
    assert found["copy"] == [False, True], "a copy of the model is a model of its own"
    for case, words in {
        "twice": "shares its prompts already: call `trainer.prompt_sharing.remove()`",
        "batch": "per_device_train_batch_size (3) must be a multiple or a divisor of num_generations (8)",
        "model": "load it with `attention_dropout=0.0`, which `disable_dropout=True` does not do.",
        "no trainer": "Accelerator has no `train`",
        "budget": "tokens_per_forward (0) must be a whole number of at least 1",
        "misplaced": "from those of whole rows, more than 0.0013. Misplaced does not fit `share_prompts`",
        "misplaced, behind rows without a token": "from those of whole rows, more than 0.0012",
    }.items():
        assert words in found[case], (case, found[case])
    assert len(found["around"]) == 1
