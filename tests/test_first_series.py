"""trl/first: the first pull request. Its tests in test_fork.py are those of every series."""

import pytest
import tiny_hub
from fork_tool import LINES, ROOT, fork, obtain

LINE = LINES["first"]
MODULE = ROOT / "trl/first/overlay/trl/models/group_packing.py"


@pytest.mark.torch
def test_an_architecture_is_refused_in_one_line_or_exact(probe):
    result = probe("first_series")
    errors = {name: error for name, error in result.items() if not isinstance(error, str)}
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}
    assert errors.keys() >= {"llama", "qwen3", "gpt-neox", "mixtral"} and (len(errors), len(result)) == (22, 34), (
        "as trl/README.md says"
    )
    for name in result.keys() - errors.keys():
        assert result[name].startswith("`prefix_sharing=True` does not support "), (name, result[name])
        assert "\n" not in result[name]
    assert {"qwen2-window", "gpt-oss-sinks"} <= result.keys() - errors.keys()


@pytest.mark.slow
@pytest.mark.torch
def test_its_own_tests_pass(forked, tmp_path):
    obtain(LINE)
    tree, folder = tmp_path / "tree", tmp_path / "tests"
    fork.build(LINE, tree, None)
    folder.mkdir()
    tiny_hub.make_for_upstream(folder)
    name = "tests/test_group_packing.py"
    (folder / name).write_bytes((LINE.folder / "overlay" / name).read_bytes())
    run = forked("upstream_tests", folder, tree, name, timeout=600)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def test_it_stays_short():
    """Lines that somebody has to read: those added to upstream's files, the module, and what tests it."""
    rows = [row for patch in fork.read_patches(LINE) for row in patch.diff.splitlines()]
    added = sum(row.startswith("+") and not row.startswith("+++") for row in rows)
    new = sum(len(path.read_text().splitlines()) for path in (LINE.folder / "overlay").rglob("*.py"))
    assert added + new <= 550
