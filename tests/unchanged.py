"""Tests that depend on the fork alone are not run again while it is as it was when they passed.

What passed is kept in .build/, so a fresh clone, as in CI, runs all. `rm .build/tests_of_the_fork.json` forgets it.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITES = (
    "test_distributed", "test_first_series", "test_old_transformers", "test_prefix_sharing", "test_series",
    "test_shared_attention", "test_shared_images", "test_shared_states",
)  # fmt: skip
RUN = (
    "trl",
    "tests/probes",
    "experiments/checks",
    "experiments/builds.py",
    "rloo_memory/models.py",
    "requirements.lock",
)
KEPT = ROOT / ".build" / "tests_of_the_fork.json"
WHY = "passed before, and the fork, the lock and the probes are as they were"


def fingerprint() -> str:
    """Of what these tests run, and of themselves."""
    files = [ROOT / "tests" / f"{name}.py" for name in (*SUITES, "conftest", "fork_tool", "rounding", "zygote")]
    for name in RUN:
        path = ROOT / name
        files += [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    caches = ("__pycache__", ".")  # of Python and of the linter
    kept = [path for path in files if not any(part.startswith(caches) for part in path.relative_to(ROOT).parts)]
    text = b"".join(path.read_bytes() for path in kept)
    return hashlib.sha256(text).hexdigest()


class Unchanged:
    """A plugin of pytest: skips what passed, and keeps what passes."""

    def __init__(self):
        self.now, self.passed = fingerprint(), set()
        try:
            kept = json.loads(KEPT.read_text())
        except (OSError, ValueError):
            kept = {}
        self.before = set(kept["passed"]) if kept.get("fingerprint") == self.now else set()

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.path.stem in SUITES and item.nodeid in self.before:
                item.add_marker(pytest.mark.skip(reason=WHY))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and Path(report.nodeid.split("::")[0]).stem in SUITES:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self):
        if self.passed and "PYTEST_XDIST_WORKER" not in os.environ and self.now == fingerprint():
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps({"fingerprint": self.now, "passed": sorted(self.before | self.passed)}))
