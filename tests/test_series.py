"""The series of the current line, patch by patch: after each one the tree builds, imports, has the options claimed so
far, and keeps the promises made so far."""

import base64

import numpy
import pytest
from fork_tool import LINES, ROOT, fork, obtain, package

LINE = LINES["current"]
SERIES = tuple(patch.name for patch in fork.read_patches(LINE))
# What patches add to RLOOConfig and GRPOConfig
OPTIONS = {
    "0005-activation-offloading.patch": {"activation_offloading"},
}
# What tests/probes/series.py tries: all else is tried by the tests that patches bring
PROMISES = {
    "0001-disable-attention-dropout.patch": ["disable-attention-dropout"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The tree before the first patch, after the first, after the second ..."""
    obtain(LINE)
    folder = tmp_path_factory.mktemp("places")
    trees = [folder / str(number) for number in range(len(SERIES) + 1)]
    for number, tree in enumerate(trees):
        fork.build(LINE, tree, SERIES[:number])
    return trees


def test_a_patch_brings_its_own_files_and_no_other(places):
    trees = [package(tree) for tree in places]
    for number, name in enumerate(SERIES):
        before, after = trees[number], trees[number + 1]
        claimed = {path.removeprefix("trl/") for path in fork.read_patch(ROOT / "trl/current" / name).claims}
        assert after.keys() - before.keys() == {path for path in claimed if not path.startswith("tests/")}, name
        assert (before == after) is name.endswith("-docs.patch"), name


@pytest.mark.slow
def test_every_place_imports_with_its_options_and_keeps_the_promises_made_so_far(places, probe):
    """And no later one."""
    asked = sum(PROMISES.values(), [])
    before = probe("series", places[0], *asked)
    assert before["kept"] == []
    promised, options = [], {trainer: set(names) for trainer, names in before["options"].items()}
    for name, tree in zip(SERIES, places[1:], strict=True):
        promised += PROMISES.get(name, [])
        added = OPTIONS.get(name, set())
        assert not any(added & names for names in options.values()), name
        options = {trainer: names | added for trainer, names in options.items()}
        result = probe("series", tree, *asked)
        assert {trainer: set(names) for trainer, names in result["options"].items()} == options, name
        assert result["kept"] == promised, name


COMPACT = "0002-compact-lm-head.patch"  # the one patch that has no option
# Relative. Rounding of float32 sums in another order, after three updates of Adam
COMPACT_TOLERANCE = 1e-5


def test_switched_off_the_patches_train_upstreams_bits_and_with_the_compact_lm_head_upstreams_numbers(places, probe):
    """Rows with padding on both sides, on the CPU. Where Triton is (CUDA), the compact head is what upstream does."""
    without = places[0].parent / "without"
    fork.build(LINE, without, tuple(name for name in SERIES if name != COMPACT))
    trees = (places[0], places[SERIES.index(COMPACT)], without, places[-1])
    untouched, before, without, whole = (probe("off", tree) for tree in trees)
    for trainer, expected in untouched.items():
        lengths = {length for call in expected["lengths"] for length in call}
        assert len(lengths) > 2, "no completion was padded: the test would be empty"
        assert before[trainer] == without[trainer] == expected, trainer

        compact, names = whole[trainer], ("loss", "grad_norm", "reward", "kl", "entropy")
        assert compact["lengths"] == expected["lengths"]  # the same tokens were sampled
        for log, expected_log in zip(compact["logs"], expected["logs"], strict=True):
            for name in expected_log.keys() & set(names):
                assert log[name] == pytest.approx(expected_log[name], rel=COMPACT_TOLERANCE, abs=1e-6), (trainer, name)
        got, stock = (
            numpy.frombuffer(base64.b64decode(run["parameters"]), numpy.float32).astype(float)
            for run in (compact, expected)
        )
        assert numpy.linalg.norm(got - stock) <= COMPACT_TOLERANCE * numpy.linalg.norm(stock), trainer
