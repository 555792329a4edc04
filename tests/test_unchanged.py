"""Tests of the fork alone are skipped only while what they run is what it was when they passed."""

from pathlib import Path
from types import SimpleNamespace

import unchanged


class Item(SimpleNamespace):
    def add_marker(self, mark):
        self.skipped = mark


def skipped(*nodeids) -> list[str]:
    items = [Item(nodeid=nodeid, path=Path(nodeid.split("::")[0]), skipped=None) for nodeid in nodeids]
    unchanged.Unchanged().pytest_collection_modifyitems(items)
    return [item.nodeid for item in items if item.skipped]


def test_what_passed_is_skipped_until_the_fork_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "KEPT", tmp_path / "build" / "kept.json")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(unchanged, "fingerprint", lambda: "as it is")
    one, two, other = (f"tests/{name}.py::test_it" for name in ("test_series", "test_shared_states", "test_launch"))
    assert skipped(one, two, other) == []
    session = unchanged.Unchanged()
    for nodeid, passed in ((one, True), (two, False), (other, True)):
        session.pytest_runtest_logreport(SimpleNamespace(when="call", passed=passed, nodeid=nodeid))
    session.pytest_sessionfinish()
    assert skipped(one, two, other) == [one]
    monkeypatch.setattr(unchanged, "fingerprint", lambda: "changed")
    assert skipped(one, two, other) == []
    session.passed = {two}
    session.pytest_sessionfinish()  # of what was changed while it ran
    monkeypatch.setattr(unchanged, "fingerprint", lambda: "as it is")
    assert skipped(two) == []


def test_the_fingerprint_is_of_every_file_that_they_run(monkeypatch):
    before = unchanged.fingerprint()
    read = Path.read_bytes
    for name in (
        "trl/current/series",
        "tests/probes/shared_exactness.py",
        "experiments/builds.py",
        "tests/test_series.py",
        "tests/fork_tool.py",
    ):
        changed = unchanged.ROOT / name
        monkeypatch.setattr(Path, "read_bytes", lambda path, changed=changed: read(path) + b"x" * (path == changed))
        assert unchanged.fingerprint() != before, name
    monkeypatch.undo()
    assert unchanged.fingerprint() == before
