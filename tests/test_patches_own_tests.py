"""The tests that patches of the current line bring."""

import pytest
import tiny_hub
from fork_tool import LINES, ROOT, fork, obtain, package

LINE = LINES["current"]
SERIES = tuple(patch.name for patch in fork.read_patches(LINE))


def own_tests(name):
    return [path for path in fork.read_patch(ROOT / "trl/current" / name).claims if path.startswith("tests/")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERIES if own_tests(name)])
def test_a_patchs_own_tests_pass_at_its_place_and_behind_the_last(forked, name, tmp_path):
    """As upstream would run them, on models and data of the same names that are made here."""
    obtain(LINE)
    tests = own_tests(name)
    tiny_hub.make_for_upstream(tmp_path)
    for path in tests:
        (tmp_path / path).write_bytes((ROOT / "trl/current/overlay" / path).read_bytes())
    place, last = tmp_path / "place", tmp_path / "last"
    fork.build(LINE, place, SERIES[: SERIES.index(name) + 1])
    fork.build(LINE, last, SERIES)
    mine, whole = package(place), package(last)
    # What later patches change runs here: Triton's kernels do not
    changed = any(mine.get(path) != text for path, text in whole.items() if not path.startswith("kernels/"))
    for tree in (place, last) if changed else (place,):
        run = forked("upstream_tests", tmp_path, tree, *tests, timeout=1200)
        assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]
