"""What the trainers of the current line do without an option of its patches."""

import base64

import numpy
import pytest
from fork_tool import LINES, fork, obtain

LINE = LINES["current"]
SERIES = tuple(patch.name for patch in fork.read_patches(LINE))
COMPACT = "0002-compact-lm-head.patch"  # the one patch that has no option
# Relative. Rounding of float32 sums in another order, after three updates of Adam
COMPACT_TOLERANCE = 1e-5


@pytest.fixture
def trained(probe, tmp_path):
    """What tests/probes/off.py finds on a tree with these patches."""
    obtain(LINE)

    def run(*patches):
        tree = tmp_path / f"with {len(patches)}"
        fork.build(LINE, tree, patches)
        return probe("off", tree)

    return run


def test_switched_off_the_patches_train_upstreams_bits_and_with_the_compact_lm_head_upstreams_numbers(trained):
    """Rows with padding on both sides, on the CPU. Where Triton is (CUDA), the compact head is what upstream does.
    From the first patch on, `disable_dropout` covers attention."""
    first, others = SERIES[0], tuple(name for name in SERIES if name != COMPACT)
    untouched, before, without, whole = (trained(*patches) for patches in ((), (first,), others, SERIES))
    for trainer, expected in untouched.items():
        assert expected.pop("dropout") == [True, True]
        assert [run[trainer].pop("dropout") for run in (before, without, whole)] == [[True, False]] * 3
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
