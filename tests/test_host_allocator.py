"""The launcher puts another malloc in place, and does not claim one that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_memory.host_allocator import LIBRARIES


def launched(name: str, folder: Path) -> subprocess.CompletedProcess:
    """With a dataset that does not exist, so that nothing is trained: the allocator comes first."""
    words = ["balanced", "--dataset_name", "no_such.csv", "--host_allocator", name]
    command = [sys.executable, "-m", "rloo_memory.launch", *words]
    return subprocess.run(command, env=os.environ | {"LD_LIBRARY_PATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.slow
def test_the_launcher_says_which_library_is_loaded_and_refuses_one_that_is_not(tmp_path):
    (library := tmp_path / LIBRARIES["jemalloc"]).write_text("not a library")
    refused = launched("jemalloc", tmp_path)
    assert refused.returncode == 2 and "launch: host_allocator 'jemalloc' is not loaded" in refused.stderr
    subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", library], input="int stand_in;", text=True, check=True)
    result = launched("jemalloc", tmp_path)
    assert result.stdout == f"host allocator: {library}\n" and "'no_such.csv': it is not here" in result.stderr


def test_what_cannot_be_put_in_place_is_refused(refused, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("a program that calls the launcher is replaced"))
    refused(["balanced", "--host_allocator", "jemalloc"], "LD_PRELOAD=libjemalloc.so.2")
    refused(["balanced", "--host_allocator", "tcmaloc"], "'tcmaloc'", "tcmalloc")
