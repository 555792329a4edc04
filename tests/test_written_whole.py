"""A suite that is killed leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

from experiments.config import ROOT


def test_a_killed_suite_leaves_nothing_in_the_temporary_folder(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    waiting = "import sys, time; from experiments.processes import Launch, end_with; from pathlib import Path; "
    waiting += "launch = Launch.read(Path(sys.argv[-1])); end_with(launch.parent); "
    waiting += "print(launch.config.run_id, flush=True); time.sleep(60)"
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{waiting}' \"$@\"\n")
    stub.chmod(0o755)
    code = (
        f"import sys; from experiments import suite; sys.executable = {str(stub)!r}; from pathlib import Path\n"
        "config = suite.cfg.resolve('stock', 2, 'test', 'cpu')\n"
        f"suite.run_one(config, Path({str(tmp_path)!r}), show=lambda text: print(text, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE
    )
    said, deadline = b"", time.monotonic() + 60
    while b"stock_test_k2_r0" not in said and time.monotonic() < deadline:
        said = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert b"stock_test_k2_r0" in said
    assert not list(temporary.iterdir())
