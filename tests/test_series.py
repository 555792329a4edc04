"""The series of the current line, patch by patch: after each one the tree builds, imports, has the options claimed so
far, and keeps the promises made so far."""

import base64
import importlib.util
import json
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("fork", ROOT / "trl" / "fork.py")
fork = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fork)

SERIES = fork.read_series(fork.find_line(ROOT / "trl", "current"))
# What each patch adds to RLOOConfig and GRPOConfig, and the promises that tests/probes/series.py tries
ADDS = {
    "0001-disable-attention-dropout.patch": (set(), ["disable-attention-dropout"]),
    "0002-compact-lm-head.patch": (set(), ["compact-lm-head"]),
    "0003-reward-model-cache.patch": (set(), ["reward-model-cache"]),
    "0004-activation-offloading-exit.patch": (set(), ["activation-offloading-exit"]),
    "0005-activation-offloading.patch": ({"activation_offloading"}, ["activation-offloading"]),
    "0006-checkpointing-arguments.patch": (set(), ["checkpointing-arguments"]),
    "0007-nothing-to-train.patch": (set(), ["nothing-to-train"]),
    "0008-prefix-sharing.patch": (
        {"prefix_sharing", "tokens_per_forward"},
        [
            "prefix-sharing",
            "prefix-sharing-fsdp2",
            "prefix-sharing-states",
            "prefix-sharing-images",
            "prefix-sharing-zero3",
            "token-budget",
            "token-budget-sharding",
            "token-budget-offloading",
            "reward-model-passes",
            "prefix-sharing-kernels",
            "prefix-sharing-decoding",
            "prefix-sharing-recomputation",
            "prefix-sharing-gradients",
            "prefix-sharing-offloading",
            "prefix-sharing-micro-batches",
            "prefix-sharing-checks",
            "prefix-sharing-faithful",
            "prefix-sharing-trainers",
        ],
    ),
    "0009-prefix-sharing-docs.patch": (set(), []),
    "0010-lm-head-on-turing.patch": (set(), []),  # tests/cuda tries it
}
# Words that stand nowhere in the package before their patch
WORDS = {"0008-prefix-sharing.patch": "prefix_sharing"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The tree before the first patch, after the first, after the second ..."""
    try:
        fork.obtain(fork.find_line(ROOT / "trl", "current"))
    except fork.WheelUnavailable as error:
        pytest.skip(f"the upstream wheel cannot be obtained here: {error}")
    folder = tmp_path_factory.mktemp("places")
    trees = [folder / str(number) for number in range(len(SERIES) + 1)]
    for number, tree in enumerate(trees):
        fork.build(ROOT / "trl", "current", tree, SERIES[:number])
    return trees


def package(tree):
    return {name: path.read_bytes() for name, path in fork.files_below(tree / "trl").items()}


def test_a_patch_brings_its_own_words_and_files_and_no_other(places):
    assert ADDS.keys() == set(SERIES)
    trees = [package(tree) for tree in places]
    for number, name in enumerate(SERIES):
        before, after = trees[number], trees[number + 1]
        claimed = {path.removeprefix("trl/") for path in fork.read_patch(ROOT / "trl/current" / name).claims}
        assert after.keys() - before.keys() == {path for path in claimed if not path.startswith("tests/")}, name
        assert (before == after) is name.endswith("-docs.patch"), name
        if name in WORDS:
            word = WORDS[name].encode()
            assert not any(word in data for data in before.values()), name
            assert any(word in data for data in after.values()), name


@pytest.mark.slow
def test_every_place_imports_with_its_options_and_each_patch_keeps_its_promise(places, probe):
    """A promise is not kept before its patch, and is at its place and at the last."""
    promised = [ADDS[name][1] for name in SERIES]
    # At each place the promises of its patch and those of the next one, at the last all
    asked = [sum(promised[max(0, i - 1) : i + 1], []) for i in range(len(SERIES))] + [sum(promised, [])]
    trees = dict(zip(map(str, places), asked, strict=True))
    results = probe("series", json.dumps(trees))
    options = {trainer: set(names) for trainer, names in results[0]["options"].items()}
    assert results[0]["kept"] == []
    for name, result in zip(SERIES, results[1:], strict=True):
        added, promises = ADDS[name]
        assert not any(added & names for names in options.values()), name
        options = {trainer: names | added for trainer, names in options.items()}
        assert {trainer: set(names) for trainer, names in result["options"].items()} == options, name
        assert result["kept"] == promises or name == SERIES[-1], name
    assert results[-1]["kept"] == sum(promised, [])


COMPACT = "0002-compact-lm-head.patch"  # the one patch that has no option
# Relative. Rounding of float32 sums in another order, after three updates of Adam
COMPACT_TOLERANCE = 1e-5


def test_switched_off_the_fork_trains_upstreams_bits_and_with_the_compact_lm_head_upstreams_numbers(places, probe):
    """Rows with padding on both sides, on the CPU. Where Triton is (CUDA), the compact head is what upstream does."""
    without = places[0].parent / "without"
    fork.build(ROOT / "trl", "current", without, tuple(name for name in SERIES if name != COMPACT))
    trees = [places[0], places[SERIES.index(COMPACT)], without, places[-1]]
    untouched, before, without, whole = probe("off", json.dumps([str(tree) for tree in trees]))
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


def own_tests(name):
    return [path for path in fork.read_patch(ROOT / "trl/current" / name).claims if path.startswith("tests/")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERIES if own_tests(name)])
def test_a_patchs_own_tests_pass_at_its_place(places, forked, name, tmp_path):
    """As upstream would run them, on models and data of the same names that are made here."""
    tests = own_tests(name)
    made = forked("upstream_fixtures", tmp_path, timeout=120)
    assert made.returncode == 0, made.stderr[-3000:]
    imported = {f"tests/test_prefix_sharing{end}.py" for end in ("", "_offloading", "_micro_batches")}
    for path in {*imported, *tests}:
        (tmp_path / path).write_bytes((ROOT / "trl/current/overlay" / path).read_bytes())
    tree = places[SERIES.index(name) + 1]
    run = forked("upstream_tests", tmp_path, tree, *tests, timeout=1200)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
