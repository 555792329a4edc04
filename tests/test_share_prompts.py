"""`share_prompts` on TRL as released: whole trainings."""

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
    runs = ("rloo two of 4 a micro-batch, lora", "rloo qwen3_5")  # test_prefix_sharing.py has all on the installed one
    check(probe("shared_trainer", *runs, "--released", release(version)), len(runs))
    check(probe("shared_images_trainer", *OF_IMAGES, "--released", release(version)), len(OF_IMAGES))
