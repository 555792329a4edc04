"""Waiting for what another process does."""

import time

import pytest

PATIENCE = 30  # seconds a busy machine may take for what normally takes a fraction of one


def until(condition):
    """Wait for `condition` and return what it returned; fail when it stays false."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.01)
    pytest.fail("waited in vain")
