"""One run: its record, its exit code, and its one-line answer to settings that cannot work."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from experiments import config as cfg
from experiments import run_device
from experiments import train as train_module
from experiments.config import ROOT
from experiments.memory_monitor import IntervalReport
from experiments.record import export, fill_peaks, read_csv
from experiments.run_record import RunRecord, stored_runs
from experiments.suite import settle_record
from rloo_memory.device import is_out_of_memory, machine_name
from rloo_memory.errors import ConfigError
from rloo_memory.phases import PhasePeak
from rloo_memory.sizes import parse_bytes
from tests.waiting import until


def test_a_finished_run_records_what_was_asked_and_what_was_fed(train):
    code, record, folder, noise = train("classic-lean", 2)
    assert code == record["exit_code"] == 0 and record["status"] == "ok"
    assert not noise, "libraries write to the log"
    assert record["device_kind"] == "cpu" and record["peak_device_used_bytes"] is None
    assert record["trl_version"] == "0.21.0" and ".build/fork/0003-lean-logits" in record["trl_file"]
    assert record["prompt_tokens_requested"] == 64 and 62 <= record["prompt_tokens_fed_mean"] <= 64
    assert len(record["trace"]) == len(record["step_seconds"]) == record["steps"]
    assert record["start_bytes"] < record["peak_resident_bytes"]
    assert record["sampler"]["samples"] == len(read_csv(folder / "memory.csv")) > 3
    assert not (ROOT / "results" / "here").exists()
    phases = [row["phase"] for row in read_csv(folder / "phases.csv")]
    # load, then per step: generate, score, and for each of the 3 epochs train and optimizer
    assert phases == ["load"] + (["generate", "score"] + ["train", "optimizer"] * 3 + ["train"]) * 2


@pytest.mark.slow
def test_no_sample_exceeds_the_recorded_peak(train):
    _, record, folder, noise = train("stock", 2)
    assert not noise
    assert record["trl_version"] == "1.16.0"
    rows, phases = read_csv(folder / "memory.csv"), read_csv(folder / "phases.csv")
    first = float(phases[1]["start"])
    highest = max(int(row["resident_bytes"]) for row in rows if float(row["timestamp"]) >= first)
    counted = max(int(row["peak_resident_bytes"]) for row in phases[1:])
    assert record["peak_resident_bytes"] == max(highest, counted)
    assert record["sampler"]["peak_missed_bytes"] == record["peak_resident_bytes"] - highest


@pytest.mark.slow
def test_accumulation_takes_one_completion_a_pass_and_gives_the_same_loss(train):
    stock, accumulate = train("stock", 2)[1], train("stock-accumulate", 2)[1]
    assert (stock["completions_per_forward"], accumulate["completions_per_forward"]) == (2, 1)
    for left, right in zip(stock["trace"], accumulate["trace"], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4, abs=1e-6)
        assert left["reward"] == pytest.approx(right["reward"], rel=1e-5)


def test_out_of_memory_is_recorded_with_exit_code_3_and_no_row_lost(train):
    code, record, folder, _ = train("classic-baseline", 8, "--vocab-size", "20000", "--budget", "100MiB")
    assert code == record["exit_code"] == 3
    assert record["status"] == "oom" and "allocate" in record["error"]
    rows = read_csv(folder / "memory.csv")
    assert rows and all(row["host_used_bytes"] for row in rows)
    assert len(read_csv(folder / "phases.csv")) >= 2
    log = (folder / "log.txt").read_text()
    assert "Traceback" in log and "experiments/train.py" in log
    assert str(cfg.ROOT) not in log and sys.prefix not in log  # nobody else's folders


@pytest.mark.slow
def test_any_other_failure_is_status_error_with_exit_code_1(train, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    shape = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 8}
    (broken / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1, "num_attention_heads": 2}))
    code, record, folder, _ = train("stock", 2, "--model", str(broken))  # it has no tokenizer and no weights
    assert code == record["exit_code"] == 1
    assert record["status"] == "error" and record["error"]
    assert record["peak_resident_bytes"] is None


@pytest.fixture
def running(tmp_path):
    """A long run that has trained for a few updates: (process, run folder)."""
    options = "--arm classic-lean --k 2 --scale test --device cpu --steps 2000 --machine here".split()
    command = [sys.executable, "-m", "experiments.train", *options, "--results", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    folder = tmp_path / "here" / "classic-lean_test_k2_r0"
    phases = folder / "phases.csv"
    until(lambda: phases.exists() and phases.read_text().count("optimizer") > 3, process, 120)
    yield process, folder
    process.kill()
    process.wait()


def test_a_killed_run_keeps_its_samples_and_is_never_called_finished(running, tmp_path):
    process, folder = running
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_csv(folder / "memory.csv")
    assert len(rows) > 3 and all(row["resident_bytes"] for row in rows[:-1])
    assert json.loads((folder / "run.json").read_text())["status"] == "running"
    started = json.loads((folder / "run.json").read_text())
    config = cfg.RunConfig.from_dict(started["config"])
    record = settle_record(config, folder.parent, started["launch"], -signal.SIGKILL, [])
    assert record["status"] == "error" and "SIGKILL" in record["error"]
    export(tmp_path / "here")
    (run,) = stored_runs(tmp_path / "here")
    assert run.record["status"] == "error" and run.record["peak_resident_bytes"] is None


OF_FOUR = ["--arm", "shared", "--k", "4", "--completions-per-forward"]
BAD = {
    "unknown arm": (["--arm", "classic-lena", "--k", "2"], "classic-lean"),
    "leave-one-out needs two": (["--arm", "classic-lean", "--k", "1"], "--k 2"),
    "batch not divisible by k": (["--arm", "classic-lean", "--k", "4", "--batch", "6"], "--batch 8"),
    "prompt longer than the positions": (["--arm", "stock", "--k", "2", "--prompt-tokens", "40000"], "32668"),
    "budget below the model": (["--arm", "stock", "--k", "2", "--budget", "1MiB"], "raise --budget"),
    "a budget without its unit": (["--arm", "stock", "--k", "2", "--budget", "24"], "did you mean 24GiB?"),
    "a budget that is too small": (["--arm", "stock", "--k", "2", "--budget", "800KiB"], "at least; write 24GiB"),
    "unreadable size": (["--arm", "stock", "--k", "2", "--budget", "lots"], "32GiB"),
    "unknown scale": (["--arm", "stock", "--k", "2", "--scale", "huge"], "seed"),
    "no steps": (["--arm", "stock", "--k", "2", "--steps", "0"], "at least 1"),
    "LoRA with the old trainer": (["--arm", "classic-lean", "--k", "2", "--scale", "test-lora"], "use stock"),
    "no completion a pass": ([*OF_FOUR, "0"], "0 is outside 1 to k=4: completions of one prompt go together; use 1"),
    "more than k a pass": ([*OF_FOUR, "5"], "5 is outside 1 to k=4: completions of one prompt go together; use 4"),
    "no part of k": ([*OF_FOUR, "3", "--arm", "shared-accumulate"], "-accumulate must divide k=4; use 2"),
    "another arm": ([*OF_FOUR, "2", "--arm", "stock"], "2: stock always takes 4; leave the option out or use --arm"),
    "unwritable results": (["--arm", "stock", "--k", "2", "--results", "/proc/nowhere"], "--results"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_setting_that_cannot_work_gets_one_clear_line(case, tmp_path, capsys):
    arguments, remedy = BAD[case]
    if "--results" not in arguments:
        arguments = [*arguments, "--results", str(tmp_path)]
    before = list(sys.path)
    code = train_module.main(["--device", "cpu", *arguments])
    assert sys.path == before, "a fork was built for a run that cannot start"
    errors = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(errors) == 1 and errors[0].startswith("train: ") and remedy in errors[0]
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("text, size", [("32GiB", 2**35), ("1.5 gb", 1.5e9), ("800MiB", 800 * 2**20), ("7", 7)])
def test_sizes_are_read_with_their_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "error, memory",
    [
        (MemoryError(), True),
        ("DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("shape '[7]' is invalid", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa)`", False),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", False),
    ],
)
def test_memory_failures_of_torch_its_libraries_and_of_causes_are_told_from_other_errors(error, memory):
    error = RuntimeError(error) if isinstance(error, str) else error
    assert is_out_of_memory(error) == memory

    def led_to(cause, **how):
        try:
            try:
                raise error
            except (RuntimeError, MemoryError):
                if how.get("handled"):
                    raise ValueError("a library says something else") from None
                if cause:
                    raise ValueError("a library says something else") from error
                raise ValueError("a library fails while it cleans up")  # noqa: B904
        except ValueError as other:
            return other

    assert is_out_of_memory(led_to(cause=True)) == is_out_of_memory(led_to(cause=False)) == memory
    assert not is_out_of_memory(led_to(cause=False, handled=True))
    ring = led_to(cause=True)
    error.__cause__ = ring
    assert is_out_of_memory(ring) == memory


@pytest.mark.torch
def test_a_mean_that_is_no_number_is_nan_in_the_trace(shared_fork):
    """TRL logs None where every value was NaN."""
    from experiments.workload.trainers import LogCollector

    phases = SimpleNamespace(step=1, grad_norms={1: [float("inf"), 2.0]})
    collector = LogCollector(phases)
    for kl, reward in ((None, 0.5), (0.5, float("nan"))):
        collector.on_log(None, None, None, logs={"loss": 2.0, "kl": kl, "reward": reward})
    missing = pytest.approx(float("nan"), nan_ok=True)
    (entry,) = collector.trace()
    assert entry == {"step": 1, "loss": 2.0} | dict.fromkeys(("reward", "kl", "grad_norm"), missing)


@pytest.mark.slow
def test_bf16_is_mixed_precision_in_both_lines(train):
    """TRL 0.21 under transformers 5 would silently train in float32 instead."""
    for arm in ("classic-baseline", "stock"):
        single, mixed = train(arm, 2)[1]["trace"], train(arm, 2, "--precision", "bf16")[1]["trace"]
        # float32 twice gives 1e-7 at most; how far bf16 goes depends on the tokens it samples
        assert abs(single[0]["grad_norm"] / mixed[0]["grad_norm"] - 1) > 1e-5, arm


def test_cuda_peaks_never_fall_below_what_torch_counted(tmp_path):
    """A peak between two samples of the device: torch's pool at its peak plus what the device held besides it."""
    (tmp_path / "memory.csv").write_text(
        "timestamp,device_used_bytes,process_device_bytes,resident_bytes\n"
        "9,9000,,50\n11,1500,1200,60\n12,2500,2200,70\n13,,,80\n"
    )

    class Phases:
        outside_pool_bytes = 500
        peaks = (
            PhasePeak("load", 0, 0, 10, 9000, 9000, 90, 9000),
            PhasePeak("generate", 1, 10, 12, 900, 1000, 60, 1500),
            PhasePeak("train", 1, 12, 14, 2600, 3000, 75, 2500),
        )

    record = RunRecord("id", "stock", "seed", 2, 0, {}, "abc", device_kind="cuda")
    fill_peaks(record, Phases, tmp_path, IntervalReport(0.05, 0.05, 0.06, 4))
    assert (record.peak_allocated_bytes, record.peak_reserved_bytes) == (2600, 3000)
    assert record.peak_device_used_bytes == 3500 and record.sampler["peak_missed_bytes"] == 1000
    assert record.peak_process_device_bytes == 2200 and record.peak_resident_bytes == 80
    assert record.peak_phase == "train"


@pytest.mark.parametrize(
    "visible, wanted, left",
    [(None, "cuda:1", "1"), ("4,GPU-abc", "cuda:1", "GPU-abc"), ("4,5", "auto", "4"), ("", "auto", "")],
)
def test_only_the_chosen_gpu_stays_visible(monkeypatch, visible, wanted, left):
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shown = bool(left)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: shown)
    properties = SimpleNamespace(name="NVIDIA Test", total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    kind, name, _ = run_device.pick_device(wanted)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert (kind, name) == ("cuda", "NVIDIA Test") if shown else kind == "cpu"
    with pytest.raises(ConfigError, match="cuda:9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        run_device.pick_device("cuda:9")


def test_cuda_is_refused_where_there_is_none(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train_module.main(["--arm", "stock", "--k", "2", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_machine_folders_are_named_by_device():
    assert machine_name("cuda", "NVIDIA H200") == "nvidia-h200"
    name = machine_name("cpu", "Intel(R) Xeon(R) CPU @ 2.60GHz")
    assert name == f"cpu-intel-xeon-{os.cpu_count()}-cores"
