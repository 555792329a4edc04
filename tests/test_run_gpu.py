"""The program for a bare GPU machine: what is there is not measured again, an item that fails keeps no other one from
running, and an archive is left by whatever ends it. Its items are commands that their programs take."""

import importlib
import os
import signal
import subprocess
import tarfile

import pytest

from experiments.config import ROOT
from tests.waiting import until

# In the place of a Python with torch: answers what is asked first, and does what the file named as the item says
PYTHON = """#!/bin/bash
case "$*" in
  *--print-folder) echo {folder}/results/box && exit ;; *source_commit*) echo abc && exit ;; -c*) exit ;;
  *collect_env) echo the driver && exit ;;
esac
echo "$*" >> {folder}/asked
echo "last words"
if [ -f "{folder}/$2" ]; then . "{folder}/$2"; fi
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "python").write_text(PYTHON.format(folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out.tar.gz")}

    def run(*names, minutes="5"):
        command = [ROOT / "run_gpu.sh", *names, "--results", tmp_path / "results"]
        return subprocess.Popen(command, env={**environment, "MINUTES": minutes}, stdout=-1, stderr=-2, text=True)

    return run


def test_items_go_on_after_one_that_fails_and_nothing_is_measured_twice(start, tmp_path):
    (tmp_path / "experiments.checks.exactness").write_text("exit 1")
    (tmp_path / "experiments.bench").write_text("exit 4")
    said = start("planner", "exactness", "cells-first").communicate(timeout=60)[0]
    assert "exactness: failed, " in said and "cells-first: done, not as it should be" in said, said
    again = start("planner", "exactness", "cells-first")
    assert "planner: there" in again.communicate(timeout=60)[0] and again.returncode == 1
    asked = [line.split()[1] for line in (tmp_path / "asked").read_text().splitlines()]
    ran = ("checks.exactness", "bench", "checks.planner_check", "checks.exactness")
    assert asked == [f"experiments.{name}" for name in ran]
    assert "exactness: not begun, " in start("exactness", minutes="1").communicate(timeout=60)[0]
    assert start("nope").communicate(timeout=60)[0].startswith("run_gpu.sh: unknown item or option nope;")


def test_what_is_killed_leaves_an_archive(start, tmp_path):
    does = f"touch {tmp_path}/begun; trap 'exit 143' TERM; sleep 60 & wait"
    (tmp_path / "experiments.bench").write_text(does)
    process = start("exactness", "cells-first")
    until((tmp_path / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    with tarfile.open(tmp_path / "out.tar.gz") as packed:
        assert {"box/on_gpu/exactness.done", "box/on_gpu/cells-first.log"} <= set(packed.getnames())
        assert packed.extractfile("box/on_gpu/device.txt").read() == b"the driver\n"


def test_every_item_is_a_command_that_its_program_takes(tmp_path, capsys):
    """All that can be wrong with it here is that there is no such device."""
    listed = subprocess.run([ROOT / "run_gpu.sh", "--list"], capture_output=True, text=True, check=True).stdout
    items = [line.split() for line in listed.splitlines() if line]
    assert len(items) > 10
    for name, _, _, module, *options in items:
        program = importlib.import_module(f"experiments.{module}" + (".__main__" if module == "bench" else ""))
        where = ["--device", "cuda", "--results", str(tmp_path), "--machine", "x"]
        assert program.main([*options, *where]) == 2, name
        assert "device 'cuda' is not usable here" in capsys.readouterr().err, name
