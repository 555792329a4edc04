"""What reaches the terminal, and what does not."""

import errno
import os
import pty
import signal
import subprocess
import sys

import pytest

from experiments import config as cfg
from experiments.terminal import Live
from rloo_memory.errors import ConfigError, Stopped, exit_code


@pytest.fixture
def standard_output():
    """standard_output(fd) puts fd in the place of standard output until the test ends."""
    saved = os.dup(1)
    yield lambda handle: os.dup2(handle, 1)
    os.dup2(saved, 1)
    os.close(saved)


def test_a_terminal_has_one_changing_line(standard_output):
    reader, writer = pty.openpty()
    standard_output(writer)
    live = Live(pause=1000)
    live.show("step 1")
    live.show("step 2 " + "x" * 500)
    live.say("done")
    said = ""
    while "done\r\n" not in said:
        said += os.read(reader, 4096).decode()
    assert said.startswith("\rstep 1\x1b[K\rstep 2 x") and said.endswith("\r\x1b[Kdone\r\n")
    assert len(said) < 200, "a long line would wrap, and the next could not replace it"


def test_a_pipe_has_whole_lines_and_not_too_many(standard_output):
    reader, writer = os.pipe()
    standard_output(writer)
    live = Live(pause=1000)
    for number in range(100):
        live.show(f"step {number}")
    live.say("done")
    assert os.read(reader, 4096) == b"done\n"
    Live(pause=0).show("step 1")
    assert os.read(reader, 4096) == b"step 1\n"


def test_a_reader_that_is_gone_ends_nothing(standard_output):
    reader, writer = os.pipe()
    standard_output(writer)
    os.close(reader)
    Live(pause=0).say("nobody hears this")


NOISE = """
import os, sys
from pathlib import Path
from experiments.terminal import Live, output_to
live = Live(0)
with open(sys.argv[1], "wb", buffering=0) as log, output_to(log):
    print("noise")
    print("more noise", file=sys.stderr)
    os.system("echo noise of a child")
    live.say("heard")
print("heard again")
"""


def test_what_libraries_print_goes_to_the_log(tmp_path):
    command = [sys.executable, "-c", NOISE, str(tmp_path / "log.txt")]
    result = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("heard\nheard again\n", "")
    assert set((tmp_path / "log.txt").read_text().splitlines()) == {"noise", "more noise", "noise of a child"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_what_a_full_disk_did_not_take_stays_off_the_terminal():
    """Python keeps what could not be written, and writes it at the next occasion."""
    code = "".join(line + "\n" for line in NOISE.splitlines() if "more noise" not in line and "system" not in line)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code, "/dev/full"]
    result = subprocess.run(command, cwd=cfg.ROOT, env=buffered, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("heard\nheard again\n", "")


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ConfigError("--x 1 is bad; use 2"), 2, "x: --x 1 is bad; use 2"),
        (KeyboardInterrupt(), 130, "x: stopped by SIGINT"),
        (Stopped(signal.SIGTERM), 143, "x: stopped by SIGTERM"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/y"), 1, "No space left on device: '/tmp/y'"),
    ],
)
def test_a_command_that_did_not_do_its_work_says_so_in_one_line(error, code, said, capsys):
    def run(args):
        raise error

    assert exit_code("x", run, None) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_error_of_the_program_itself_is_not_hidden():
    def run(args):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        exit_code("x", run, None)
