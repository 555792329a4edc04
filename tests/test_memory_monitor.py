"""The sampler against real processes, and against a stub libnvidia-ml.so.1 through the real pynvml."""

import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments import memory_monitor, train
from experiments.memory_monitor import interval_report, start_monitor, stop_monitor
from experiments.run_device import cuda_uuid
from experiments.run_record import SAMPLE_COLUMNS
from rloo_memory.nvml import Device, visible_devices
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parent.parent
A = "GPU-aaaaaaaa-0000-1111-2222-333333333333"
B = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
MIG = "MIG-cccccccc-0000-1111-2222-333333333333"
GIB = 2**30


def rows(path):
    """The whole rows so far."""
    text = path.read_text() if path.exists() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


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
    folder = tmp_path / "no_nvml"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_text("not a library")
    return folder


@pytest.fixture
def watched():
    """A process to watch."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def monitor(watched, tmp_path):
    """Start the sampler as a command: monitor(library folder, *arguments, **environment)."""
    started = []

    def start(library, *arguments, pid=watched.pid, **environment):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "STUB_"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.memory_monitor", "--pid", str(pid)]
            + ["--output", str(tmp_path / "memory.csv"), "--interval", "0.02", *arguments],
            cwd=ROOT,
            env=inherited | {"LD_LIBRARY_PATH": str(library)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    """Stop the sampler with SIGTERM: its report and its stderr."""
    process.terminate()
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    return json.loads(stdout), stderr


def refusal(process):
    """The one line of a sampler that ends by itself with exit code 2."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    return stderr


def test_rows_and_report(monitor, no_nvml, watched, tmp_path):
    before = time.time()
    process = monitor(no_nvml, "--device", "none")
    until(lambda: len(rows(tmp_path / "memory.csv")) >= 12)
    report, stderr = finish(process)
    assert stderr == ""  # nothing to say: no device was asked for
    text = (tmp_path / "memory.csv").read_text()
    assert text.splitlines()[0].split(",") == list(SAMPLE_COLUMNS)
    assert text.endswith("\n") and all(line.count(",") == len(SAMPLE_COLUMNS) - 1 for line in text.splitlines())
    written = rows(tmp_path / "memory.csv")
    assert report["samples"] == len(written) and report["device"] is None
    assert report["requested_interval_s"] == 0.02
    assert 0 < report["achieved_interval_s"] <= report["longest_gap_s"]
    stamps = [float(row["timestamp"]) for row in written]
    assert before < stamps[0] and stamps == sorted(stamps) and stamps[-1] < time.time()
    # Deadlines are multiples of the interval: a row may come late, never early.
    assert all(float(row["elapsed_s"]) >= 0.02 * index - 1e-3 for index, row in enumerate(written))
    for row in written:
        assert row["device_used_bytes"] == row["device_total_bytes"] == row["process_device_bytes"] == ""
        assert 0 < int(row["resident_bytes"]) < 64 * 2**20 < int(row["host_used_bytes"])
    assert written[0]["cpu_percent"] == "" and float(written[-1]["cpu_percent"]) >= 0


def test_a_late_row_skips_deadlines(monitor, no_nvml, tmp_path):
    process = monitor(no_nvml, "--device", "none")
    until(lambda: rows(tmp_path / "memory.csv"))
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    until(lambda: float(rows(tmp_path / "memory.csv")[-1]["elapsed_s"]) > 0.6)
    report = finish(process)[0]
    deadlines = float(rows(tmp_path / "memory.csv")[-1]["elapsed_s"]) / 0.02
    assert report["samples"] < deadlines - 15  # 25 were missed and are not made up for
    assert report["longest_gap_s"] > 0.4


def test_resident_memory_and_cpu_of_a_busy_process(monitor, no_nvml, tmp_path):
    code = "block = bytearray(96 << 20)\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        busy.stdout.readline()
        monitor(no_nvml, pid=busy.pid)
        until(lambda: any(float(row["cpu_percent"] or 0) > 5 for row in rows(tmp_path / "memory.csv")))
        busy.kill()
    assert all(int(row["resident_bytes"]) > 96 << 20 for row in rows(tmp_path / "memory.csv"))


def test_device_memory_follows_the_device(monitor, stub, watched, tmp_path):
    used = tmp_path / "used"

    def use(text):  # replaced in one step, so that the stub never reads half a number
        (tmp_path / "next").write_text(str(text))
        os.replace(tmp_path / "next", used)

    def seen():
        return [row["device_used_bytes"] for row in rows(tmp_path / "memory.csv")]

    use(2 * GIB)
    other = os.getpid()  # neither the watched process nor below it
    listed = f"{watched.pid}:{GIB},{other}:{7 * GIB}"
    process = monitor(stub, STUB_NVML_USED_FILE=str(used), STUB_NVML_PROCESSES=listed, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    for level in (2 * GIB, 9 * GIB, 3 * GIB):
        use(level)
        until(lambda level=level: str(level) in seen())
    report, stderr = finish(process)
    assert report["device"] == "Stub A" and stderr == ""
    distinct = list(dict.fromkeys(seen()))
    assert distinct == [str(2 * GIB), str(9 * GIB), str(3 * GIB)]
    assert report["device_processes"] == "ours"
    for row in rows(tmp_path / "memory.csv"):
        assert (row["device_total_bytes"], row["device_utilization_percent"]) == (str(80 * GIB), "37")
        assert row["process_device_bytes"] == str(GIB)


def test_device_memory_of_children_counts(monitor, stub, tmp_path):
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        monitor(stub, pid=parent.pid, STUB_NVML_PROCESSES=f"{parent.pid}:1000,{child}:234")
        first = until(lambda: rows(tmp_path / "memory.csv"))[0]
        os.kill(child, signal.SIGKILL)
        parent.kill()
    assert first["process_device_bytes"] == "1234"


@pytest.mark.parametrize(
    ("listed", "seen"),
    [("", "not ours"), ("{pid}:-1", "ours"), ("{pid}:5,4000000000:7", "foreign"), ("4000000000:7", "foreign")],
    ids=["not listed", "listed without a size", "ours beside ids of a host", "ids of a host"],
)
def test_unknown_process_use_is_empty_not_zero_or_wrong(monitor, stub, watched, tmp_path, listed, seen):
    process = monitor(stub, STUB_NVML_PROCESSES=listed.format(pid=watched.pid))
    until(lambda: rows(tmp_path / "memory.csv") and float(rows(tmp_path / "memory.csv")[-1]["elapsed_s"]) > 0.6)
    report = finish(process)[0]
    for row in rows(tmp_path / "memory.csv"):
        assert row["process_device_bytes"] == "" and row["device_used_bytes"] == str(GIB)
    assert report["device_processes"] == seen


def test_the_list_of_processes_is_read_twice_a_second_only(monkeypatch):
    """Reading it may keep the trained process from allocating; the device's level is read for every row."""
    calls = {"level": 0, "processes": 0}

    def count(name, value):
        calls[name] += 1
        return value

    level = SimpleNamespace(used=GIB, total=2 * GIB)
    entry = SimpleNamespace(pid=os.getpid(), usedGpuMemory=4096)
    for name, answer in (
        ("nvmlDeviceGetMemoryInfo", lambda handle: count("level", level)),
        ("nvmlDeviceGetComputeRunningProcesses_v3", lambda handle: count("processes", [entry])),
        ("nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=1)),
    ):
        monkeypatch.setattr(memory_monitor.pynvml, name, answer)
    readable, writable = os.pipe()
    lines = []
    output = SimpleNamespace(write=lambda line: lines.append(bytes(line)) or len(line), fileno=lambda: -1)
    stop = threading.Timer(1.2, lambda: os.write(writable, b"x"))
    stop.start()
    report = memory_monitor.sample(psutil.Process(), output, 0.02, Device(A, "stub"), readable)
    assert calls["level"] == report.samples > 20 and 2 <= calls["processes"] <= 3
    assert report.device_processes == "ours" and all(b",4096," in line for line in lines[1:])
    os.close(readable)
    os.close(writable)


def test_of_a_mig_instance_the_sampler_is_asked_by_what_cuda_was_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert cuda_uuid() == MIG


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [
        (None, "1", "Stub B"),
        ("1,0", "auto", "Stub B"),
        (f"{B},{A}", "1", "Stub A"),
        ("GPU-bbbb", "0", "Stub B"),
        (MIG, "auto", "Stub B MIG 1g"),
        ("0", B.removeprefix("GPU-"), "Stub B"),
        ("", "auto", None),
        ("-1", "auto", None),
    ],
)
def test_device_choice(monitor, stub, tmp_path, visible, device, name):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    process = monitor(stub, "--device", device, **environment)
    first = until(lambda: rows(tmp_path / "memory.csv"))[0]
    report, stderr = finish(process)
    assert report["device"] == name
    assert (first["device_used_bytes"] != "") == (name is not None)
    assert ("resident memory only" in stderr) == (name is None)
    # Index 1 among unlike GPUs may be another one to CUDA; a UUID cannot be.
    assert ("CUDA_DEVICE_ORDER" in stderr) == (visible in (None, "1,0"))


def test_visible_devices_end_at_the_first_unknown_entry():
    devices = [Device(A, "first"), Device(B, "second"), Device(MIG, "part")]
    assert visible_devices(devices, None) == devices[:2]
    assert visible_devices(devices, "1, 0") == [devices[1], devices[0]]
    assert visible_devices(devices, "1,7,0") == [devices[1]]
    assert visible_devices(devices, "GPU-") == []  # the start of two UUIDs names neither
    assert visible_devices(devices, f"{MIG[:8]},0") == [devices[2], devices[0]]


@pytest.mark.parametrize(
    ("visible", "left", "count"),
    [(None, "0", 2), ("1,0", "1", 2), (f"{B},{A},{MIG}", B, 3), ("1", "1", None), ("", "", None)],
)
def test_the_launcher_leaves_one_gpu_visible_and_says_so(stub, visible, left, count):
    """The stub has two."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    shown = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    code = "import os\nfrom rloo_memory.device import show_one_gpu\n"
    run = subprocess.run(
        [sys.executable, "-c", code + "print(show_one_gpu(), os.environ['CUDA_VISIBLE_DEVICES'], sep='|', end='')"],
        cwd=ROOT,
        env=inherited | {"LD_LIBRARY_PATH": str(stub)} | shown,
        capture_output=True,
        text=True,
        check=True,
    )
    said, variable = run.stdout.split("|")
    assert variable == left
    if count is None:
        assert not said
    else:
        assert said.startswith(f"{count} GPUs are visible") and f"CUDA_VISIBLE_DEVICES={left}." in said


@pytest.mark.parametrize(
    ("library", "device", "said"),
    [("no_nvml", device, "Library Not Found") for device in ("auto", "0", A)]
    + [("stub", "auto", "Driver Not Loaded")],
)
def test_without_nvml_it_samples_resident_memory_and_says_so(monitor, request, tmp_path, library, device, said):
    process = monitor(request.getfixturevalue(library), "--device", device, STUB_NVML_INIT="9")
    until(lambda: len(rows(tmp_path / "memory.csv")) >= 3)
    report, stderr = finish(process)
    assert stderr.count("resident memory only") == stderr.count("\n") == 1 and said in stderr
    assert report["device"] is None
    assert all(row["device_used_bytes"] == "" < row["resident_bytes"] for row in rows(tmp_path / "memory.csv"))


def test_device_lost_on_the_way(monitor, stub, watched, tmp_path):
    used = tmp_path / "used"
    used.write_text("5000")
    stubbed = {"STUB_NVML_USED_FILE": str(used), "STUB_NVML_PROCESSES": f"{watched.pid}:17"}
    process = monitor(stub, "--device", A, "--interval", "0.01", **stubbed)
    until(lambda: rows(tmp_path / "memory.csv"))
    (tmp_path / "next").write_text("lost")
    os.replace(tmp_path / "next", used)
    until(lambda: [row["device_used_bytes"] for row in rows(tmp_path / "memory.csv")].count("") >= 3)
    report, stderr = finish(process)
    assert stderr.count("\n") == 1 and "GPU is lost" in stderr
    written = rows(tmp_path / "memory.csv")
    device_cells = [SAMPLE_COLUMNS[index] for index in range(2, 6)]
    assert all(written[0][cell] for cell in device_cells)
    # All at once: nothing read before the loss is repeated after it.
    assert not any(row[cell] for row in written if not row["device_used_bytes"] for cell in device_cells)
    assert all(int(row["resident_bytes"]) > 0 for row in written)
    assert report["device"] == "Stub A"  # what was sampled while it lasted


def test_a_device_that_does_not_tell_its_memory_tells_the_rest(monitor, stub, watched, tmp_path):
    process = monitor(stub, "--device", A, STUB_NVML_MEMORY="3", STUB_NVML_PROCESSES=f"{watched.pid}:4096")
    until(lambda: len(rows(tmp_path / "memory.csv")) >= 3)
    report, stderr = finish(process)
    assert stderr.count("\n") == 1 and "Stub A does not tell its memory (Not Supported)" in stderr
    for row in rows(tmp_path / "memory.csv"):
        assert row["device_used_bytes"] == row["device_total_bytes"] == ""
        assert (row["device_utilization_percent"], row["process_device_bytes"]) == ("37", "4096")
    assert (report["device"], report["device_processes"]) == ("Stub A", "ours")


@pytest.mark.parametrize("ended", ["sampler by SIGINT", "watched process by SIGKILL"])
def test_it_ends_with_a_report_of_its_rows(monitor, no_nvml, watched, tmp_path, ended):
    process = monitor(no_nvml, "--device", "none", "--interval", "0.1")
    until(lambda: rows(tmp_path / "memory.csv"))
    if ended == "sampler by SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        watched.kill()  # and not waited for: a zombie, which still has a pid
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    written = rows(tmp_path / "memory.csv")
    assert json.loads(stdout)["samples"] == len(written)
    assert all(int(row["resident_bytes"]) > 0 for row in written)


def test_a_reader_that_is_gone_does_not_fail_the_exit(monitor, no_nvml, watched, tmp_path):
    process = monitor(no_nvml)
    until(lambda: rows(tmp_path / "memory.csv"))
    process.stdout.close()
    process.stderr.close()
    watched.kill()
    assert process.wait(timeout=PATIENCE) == 0
    process.stdout = process.stderr = None


def test_a_reused_pid_is_not_the_watched_process(tmp_path):
    process = psutil.Process()
    assert process.is_running()
    process._ident = (process.pid, 0.0)  # as if the pid had belonged to a process that began at boot
    assert process != psutil.Process()
    read, write = os.pipe()
    os.write(write, b"stop")  # after one row, if it came to that
    with open(tmp_path / "memory.csv", "wb", buffering=0) as output:
        report = memory_monitor.sample(process, output, 0.01, None, read)
    os.close(read)
    os.close(write)
    assert report.samples == 0
    assert (tmp_path / "memory.csv").read_text() == ",".join(SAMPLE_COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        ("--interval", ("0.001", "5", "nan", "fast"), "'{value}' is not within 0.01 to 1 seconds; choose"),
        ("--output", ("missing/memory.csv", "README.md/memory.csv", "."), "cannot write {value}: "),
        ("--device", ("2", "GPU-ffff", "GPU-"), f"'{{value}}'|0 = {B} (Stub B)|{A} (Stub A, by UUID only)"),
        ("--pid", ("4194305",), "{value}"),  # above what Linux gives
    ],
)
def test_bad_arguments_are_refused_in_one_line(monitor, request, tmp_path, option, values, said):
    library = request.getfixturevalue("stub" if option == "--device" else "no_nvml")
    for value in values:
        line = refusal(monitor(library, "--device", "none", option, value, CUDA_VISIBLE_DEVICES="1"))
        assert all(text in line for text in said.format(value=value).split("|")), line
        assert not (tmp_path / "memory.csv").exists()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit to make a write fail part of the way")
def test_full_disk_keeps_whole_rows(monitor, no_nvml, tmp_path):
    output = tmp_path / "memory.csv"
    process = monitor(no_nvml, "--device", "none")
    until(lambda: rows(output))
    limit = output.stat().st_size + 1000  # well inside a line, as lines are not 1000 bytes long
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (3, "")
    assert stderr.count("\n") == 1 and f"cannot write on {output}" in stderr
    text = output.read_text()
    assert limit - 200 < len(text) <= limit and text.endswith("\n")
    assert all(line.count(",") == len(SAMPLE_COLUMNS) - 1 for line in text.splitlines())


def test_interval_report():
    assert interval_report([10.0, 10.1, 10.2, 10.7, 10.8], 0.1) == memory_monitor.IntervalReport(0.1, 0.1, 0.5, 5)
    assert interval_report([0.0, 0.1, 0.4], 0.1).achieved_interval_s == pytest.approx(0.2)
    assert interval_report([3.0], 0.1) == memory_monitor.IntervalReport(0.1, None, None, 1)
    assert interval_report([], 0.1).samples == 0


def test_start_and_stop_from_another_folder(stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub))
    monkeypatch.setenv("STUB_NVML_PROCESSES", f"{os.getpid()}:4096")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("memory.csv").write_text("old\nrows\nof another run\n")
    process = start_monitor(Path("memory.csv"), interval=0.01, device="auto")
    try:
        first = rows(tmp_path / "memory.csv")[0]
        assert os.getpgid(process.pid) != os.getpgid(0)  # a Ctrl-C in the terminal does not reach it
    finally:
        report = stop_monitor(process)
    assert first["process_device_bytes"] == "4096"
    assert report.requested_interval_s == 0.01 and report.samples == len(rows(tmp_path / "memory.csv"))
    assert "CUDA_DEVICE_ORDER" in capsys.readouterr().err  # what the sampler said is passed on
    assert process.returncode == 0


def test_a_run_on_a_device_that_nvml_does_not_list_goes_on_without_it(stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub))
    monkeypatch.setattr(train.run_device, "cuda_uuid", lambda: "GPU-ffff")
    process = train.start_sampler(tmp_path / "memory.csv", SimpleNamespace(device="cuda", interval=0.01))
    report = stop_monitor(process)
    assert report.samples and rows(tmp_path / "memory.csv")[0]["device_used_bytes"] == ""
    said = capsys.readouterr().err
    assert "no device 'GPU-ffff'" in said and "sampling resident memory only\n" in said


def test_start_passes_the_refusal_on(tmp_path):
    with pytest.raises(RuntimeError, match="cannot write"):
        start_monitor(tmp_path / "missing" / "memory.csv", interval=0.05, device="none")


def test_a_killed_sampler_keeps_every_row_and_leaves_no_report(tmp_path):
    process = start_monitor(tmp_path / "memory.csv", interval=0.01, device="none")
    until(lambda: len(rows(tmp_path / "memory.csv")) >= 10)
    seen = rows(tmp_path / "memory.csv")
    process.kill()
    assert stop_monitor(process) is None
    written = rows(tmp_path / "memory.csv")
    assert written[: len(seen)] == seen
    assert all(float(row["timestamp"]) > 0 and int(row["resident_bytes"]) > 0 for row in written)


def test_a_parent_that_raises_leaves_nothing_behind(tmp_path):
    code = f"""
from pathlib import Path
from experiments.memory_monitor import start_monitor
print(start_monitor(Path({str(tmp_path / "memory.csv")!r}), 0.01, "none").pid, flush=True)
raise ValueError("the run failed")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 1 and "the run failed" in run.stderr

    def ended():
        pid = int(run.stdout)
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    until(ended)
    assert rows(tmp_path / "memory.csv")
