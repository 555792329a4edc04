"""Waiting for what another process does."""

import time

import pytest

PATIENCE = 30  # seconds a busy machine may take for what normally takes a fraction of one


def until(condition, process=None, seconds=PATIENCE):
    """Wait for `condition` and return what it returned; fail when it stays false, or `process` ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    pytest.fail("waited in vain")
