"""The sampler against real processes, and against a stub libnvidia-ml.so.1 through the real pynvml."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from experiments.config import ROOT
from experiments.run_record import SAMPLE_COLUMNS, read_rows
from tests.waiting import PATIENCE, until

MIG = "MIG-cccccccc-0000-1111-2222-333333333333"
GIB = 2**30
TOTALS = {80 * GIB: "A", 40 * GIB: "B", 5 * GIB: "MIG"}


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    """A folder with the stub NVML library."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler (cc) for the stub NVML library")
    folder = tmp_path_factory.mktemp("nvml")
    source = ROOT / "tests" / "stub_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@pytest.fixture
def no_nvml(tmp_path):
    """A folder whose NVML library cannot be loaded, so that a real one stays out of the test."""
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    return tmp_path


def environment(library, **more):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return inherited | {"LD_LIBRARY_PATH": str(library)} | more


@pytest.fixture
def monitor(tmp_path):
    """monitor(library folder, *arguments, **environment) samples a process until it has some rows, and kills the
    process, which ends the sampler; returns the rows and what it said. `meanwhile` is called with the process's id."""

    def start(library, *arguments, meanwhile=lambda pid: None, watched=("sleep", "60"), **variables):
        output = tmp_path / "memory.csv"
        with subprocess.Popen(watched) as process:
            variables = {name: value.format(pid=process.pid) for name, value in variables.items()}
            words = ["--pid", str(process.pid), "--output", str(output), "--interval", "0.02", *arguments]
            sampler = subprocess.Popen(
                [sys.executable, "-m", "experiments.memory_monitor", *words],
                cwd=ROOT,
                env=environment(library, **variables),
                stderr=subprocess.PIPE,
                text=True,
            )
            until(lambda: len(list(read_rows(output))) >= 5, sampler)
            meanwhile(process.pid)
            process.kill()  # and not waited for: a zombie, which still has a pid
            said = sampler.communicate(timeout=PATIENCE)[1]
        assert sampler.returncode == 0
        return list(read_rows(output)), said

    return start


def test_a_row_is_written_at_every_interval_and_a_late_one_skips_deadlines(monitor, no_nvml, tmp_path):
    busy = (sys.executable, "-c", "block = bytearray(96 << 20)\nwhile True: pass")
    before = time.time()
    grown = lambda: list(read_rows(tmp_path / "memory.csv"))[-1]["resident_bytes"] > 96 << 20  # noqa: E731
    rows, said = monitor(no_nvml, "--device", "none", watched=busy, meanwhile=lambda pid: until(grown))
    assert not said, "no device was asked for"
    assert tuple(rows[0]) == SAMPLE_COLUMNS
    stamps = [row["timestamp"] for row in rows]
    assert before < stamps[0] and stamps == sorted(stamps) and stamps[-1] < time.time()
    assert all(row["elapsed_s"] >= 0.02 * index - 1e-3 for index, row in enumerate(rows)), "late, never early"
    assert rows[0]["cpu_percent"] is None and max(row["cpu_percent"] for row in rows[1:]) > 5
    assert all(row["device_used_bytes"] is None and row["host_used_bytes"] > row["resident_bytes"] for row in rows)


def test_device_memory_follows_the_device_and_the_process_is_the_watched_one(monitor, stub, tmp_path):
    used = tmp_path / "used"
    used.write_text(str(2 * GIB))

    def grow(pid):
        used.write_text(str(9 * GIB))
        until(lambda: list(read_rows(tmp_path / "memory.csv"))[-1]["device_used_bytes"] == 9 * GIB)

    listed = f"{{pid}}:{GIB},{os.getpid()}:{7 * GIB}"
    rows, said = monitor(stub, meanwhile=grow, STUB_NVML_USED_FILE=str(used), STUB_NVML_PROCESSES=listed)
    assert {2 * GIB, 9 * GIB} <= {row["device_used_bytes"] for row in rows} and not said
    columns = ("device_total_bytes", "device_utilization_percent", "process_device_bytes")
    assert {tuple(row[name] for name in columns) for row in rows} == {(80 * GIB, 37, GIB)}


@pytest.mark.parametrize(
    ("visible", "device", "sampled"),
    [("1,7,0", "auto", "B"), (MIG, "auto", "MIG"), ("0", "GPU-bb", "B"), ("7,0", "auto", None), ("0", "GPU-", None)],
)
def test_the_device_is_the_one_that_cuda_shows_or_that_is_named(monitor, stub, visible, device, sampled):
    """CUDA shows what comes before the first unknown entry; the start of two UUIDs names neither."""
    rows, said = monitor(stub, "--device", device, CUDA_VISIBLE_DEVICES=visible)
    assert {TOTALS.get(row["device_total_bytes"]) for row in rows} == {sampled}
    assert said.count("sampling resident memory only") == (sampled is None)


def test_without_nvml_it_samples_resident_memory_and_says_so(monitor, no_nvml):
    rows, said = monitor(no_nvml)
    assert said.count("\n") == 1 and "sampling resident memory only" in said
    assert all(row["device_used_bytes"] is None and row["resident_bytes"] for row in rows)


def test_the_launcher_leaves_one_of_two_gpus_visible_and_says_so(stub):
    code = "import os\nfrom rloo_memory.device import show_one_gpu\n"
    code += "print(show_one_gpu(), os.environ['CUDA_VISIBLE_DEVICES'], show_one_gpu(), sep='|', end='')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(stub), capture_output=True, text=True)
    said, visible, again = run.stdout.split("|")
    assert said.startswith("2 GPUs are visible") and (visible, again) == ("0", "")
