"""What may happen to a run from outside: signals, a lost sampler, a folder that goes, a full disk, another locale."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from experiments import train as train_module
from experiments.config import ROOT
from experiments.record import read_csv
from experiments.run_record import RUNS, read_record, stored_runs
from tests.waiting import until

RUN = "classic-lean_test_k2_r0"
OPTIONS = ["--k", "2", "--scale", "test", "--device", "cpu", "--threads", "1", "--machine", "here"]
pytestmark = pytest.mark.torch


@pytest.fixture
def start(tmp_path):
    """start("train" or "suite", steps, ...) starts one; returns (process, run folder) when the run has trained."""
    started = []

    def start(program, steps, *more, environment=None, trained=True):
        arms = ["--arm" if program == "train" else "--arms", "classic-lean"]
        command = [sys.executable, "-m", f"experiments.{program}", *arms, *OPTIONS, "--steps", str(steps), *more]
        process = subprocess.Popen(
            [*command, "--results", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        folder = tmp_path / "here" / RUN
        file, sign, often = ("phases.csv", "optimizer", 4) if trained else ("memory.csv", "\n1", 1)
        until(lambda: (folder / file).exists() and (folder / file).read_text().count(sign) >= often, process, 120)
        return process, folder

    yield start
    for process in started:
        process.kill()
        process.communicate()


def running(folder):
    """The processes that run or sample into `folder`. A suite's run does not name it in its command line."""
    found, run = [], read_record(folder)["pid"]
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and (process.info["pid"] == run or str(folder.parents[1]) in words):
            found.append(words)
    return found


@pytest.mark.parametrize("number", (signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)))
def test_a_stopped_run_says_so_and_keeps_what_it_measured(number, start):
    process, folder = start("train", 3000)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and not err
    record = read_record(folder)
    assert (record["status"], record["exit_code"]) == ("error", 128 + number)
    assert record["error"] == f"interrupted by {number.name}" and record["error"] in out.splitlines()[-1]
    assert record["trace"] and record["sampler"]["samples"] == len(read_csv(folder / "memory.csv"))
    (run,) = stored_runs(folder.parent)
    assert (run.run_id, run.record["status"]) == (RUN, "error") and (folder.parent / RUNS).exists()
    assert not running(folder)


@pytest.mark.slow
def test_a_run_ends_with_the_suite_that_was_told_to_stop_and_nobody_takes_its_folder_before(start, capsys):
    process, folder = start("suite", 3000)
    config = ["--arm", "classic-lean", *OPTIONS, "--results", str(folder.parents[1])]
    assert train_module.main(config) == 2
    owner = read_record(folder)["pid"]
    assert owner != process.pid and f"{folder} is being written by process {owner} (since" in capsys.readouterr().err
    assert (folder / "memory.csv").exists()
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and not err
    assert out.splitlines()[-2].split() == ["classic-lean", "stopped"] and "SIGTERM" in out.splitlines()[-1]
    assert read_record(folder)["error"] == "interrupted by SIGTERM"
    assert not running(folder)


@pytest.mark.slow
def test_a_run_ends_with_the_suite_that_was_killed(start):
    process, folder = start("suite", 3000)
    process.kill()
    until(lambda: not running(folder), seconds=120)
    assert read_record(folder)["error"] == "interrupted by SIGTERM"


def sampler_of(process):
    (sampler,) = until(
        lambda: [p for p in psutil.Process(process.pid).children() if "memory_monitor" in p.cmdline()[2]], seconds=120
    )
    return sampler


@pytest.mark.parametrize("number", (signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)))
def test_a_lost_sampler_is_said_and_the_peak_is_the_kernels(number, start):
    """One that is gone, and one that hangs."""
    process, folder = start("train", 6, trained=False)
    sampler_of(process).send_signal(number)
    out, err = process.communicate(timeout=120)
    record = read_record(folder)
    assert (process.returncode, record["status"], err) == (0, "ok", "")
    phases = read_csv(folder / "phases.csv")
    counted = [int(row["peak_resident_bytes"]) for row in phases if row["phase"] != "load"]
    assert record["peak_resident_bytes"] == max(counted) > record["start_bytes"]
    assert record["sampler"]["lost_after_s"] == float(read_csv(folder / "memory.csv")[-1]["elapsed_s"])
    assert record["sampler"]["peak_from"] == "the kernel's high-water mark"
    assert "SAMPLER LOST after" in out.splitlines()[-1] and "high-water mark" in out.splitlines()[-1]
    assert not running(folder)


@pytest.mark.slow
def test_a_folder_removed_under_a_run_is_said_in_one_line(start):
    process, folder = start("train", 6)
    shutil.rmtree(folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "FAILED" in out.splitlines()[-1]
    assert err == f"train: cannot write to {folder}: the run's folder was removed or replaced meanwhile\n"
    assert not folder.exists()


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_samples_are_kept(start):
    """A limit on the size of files stands for it: the phases' file reaches it first."""
    process, folder = start("train", 3000)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "is full" in out.splitlines()[-1] and "make room" in out.splitlines()[-1]
    record = read_record(folder)
    assert record["status"] == "error" and "is full" in record["error"]
    assert record["sampler"]["samples"] == len(read_csv(folder / "memory.csv")) > 3
    assert "Traceback" not in err


@pytest.mark.slow
def test_another_time_zone_and_locale_and_an_accent_in_the_path(start, tmp_path):
    """ASCII alone on the terminal, a clock far from UTC, and a sampler that agrees with the phases on the time."""
    results = tmp_path / "résultats d'été"
    away = {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arms = ["--arm", "classic-lean", *OPTIONS]
    command = [sys.executable, "-m", "experiments.train", *arms, "--results", str(results)]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **away}, capture_output=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, b"")
    record = json.loads((results / "here" / RUN / "run.json").read_text())
    assert record["status"] == "ok" and record["started_at"].endswith("+00:00")
    assert record["sampler"]["peak_missed_bytes"] is not None
    assert (results / "here" / RUNS).exists()
