"""The tests that patches of TRL 1.16 bring."""

import pytest
import tiny_hub
from fork_tool import LINES, files, fork, obtain

WITH_TESTS = [
    (line, patch)
    for line in (LINES["current"], LINES["first"])
    for patch in fork.read_patches(line)
    if any(path.startswith("tests/") for path in patch.claims)
]


@pytest.mark.slow
@pytest.mark.parametrize("line, patch", WITH_TESTS, ids=[patch.name for _, patch in WITH_TESTS])
def test_a_patchs_own_tests_pass_at_its_place_and_behind_the_last(forked, line, patch, tmp_path):
    """As upstream would run them, on models and data of the same names that are made here."""
    obtain(line)
    tests = [path for path in patch.claims if path.startswith("tests/")]
    tiny_hub.make_for_upstream(tmp_path)
    for path in tests:
        (tmp_path / path).write_bytes((line.folder / "overlay" / path).read_bytes())
    series = [each.name for each in fork.read_patches(line)]
    place, last = tmp_path / "place", tmp_path / "last"
    fork.build(line, place, tuple(series[: series.index(patch.name) + 1]))
    fork.build(line, last, tuple(series))
    mine, whole = files(place / "trl"), files(last / "trl")
    # What later patches change runs here: Triton's kernels do not
    changed = any(mine.get(path) != text for path, text in whole.items() if not path.startswith("kernels/"))
    for tree in (place, last) if changed else (place,):
        run = forked("upstream_tests", tmp_path, tree, *tests, timeout=1200)
        assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]
