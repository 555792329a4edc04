"""trl/first: the first pull request. What is tried of every series: test_fork.py, test_patches_own_tests.py."""

from fork_tool import LINES, fork

LINE = LINES["first"]


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


def test_it_stays_short():
    """Lines that somebody has to read: those added to upstream's files, the module, and what tests it."""
    rows = [row for patch in fork.read_patches(LINE) for row in patch.diff.splitlines()]
    added = sum(row.startswith("+") and not row.startswith("+++") for row in rows)
    new = sum(len(path.read_text().splitlines()) for path in (LINE.folder / "overlay").rglob("*.py"))
    assert added + new <= 550
