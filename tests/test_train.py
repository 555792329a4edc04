"""One run: its record, its exit code, what may happen to it, and its one-line answer to what cannot work."""

import subprocess
import sys

import psutil
import pytest
from transformers import AutoTokenizer

from experiments import config as cfg
from experiments import train as train_module
from experiments.arms import ARMS
from experiments.config import ROOT
from experiments.record import read_csv
from experiments.run_options import Parser, add_settings, as_words
from experiments.run_record import read_record, stored_runs
from experiments.workload import trainers
from rloo_memory.device import is_out_of_memory
from tests.waiting import until

OPTIONS = ["--k", "2", "--scale", "test", "--device", "cpu", "--threads", "1", "--machine", "here"]
RUN = "classic-lean_test_k2_r0"


def test_a_finished_run_records_what_was_asked_and_what_was_fed(train):
    code, record, folder, noise = train("classic-lean", 2)
    assert code == record["exit_code"] == 0 and record["status"] == "ok"
    assert not noise, "libraries write to the log"
    assert record["device_kind"] == "cpu" and record["peak_device_used_bytes"] is None
    assert record["trl_version"] == "0.21.0" and ".build/fork/0003-lean-logits" in record["trl_file"]
    assert record["prompt_tokens_requested"] == 64 and 62 <= record["prompt_tokens_fed_mean"] <= 64
    assert len(record["trace"]) == len(record["step_seconds"]) == record["config"]["steps"]
    assert record["start_bytes"] < record["peak_resident_bytes"]
    assert record["sampler"]["samples"] == len(read_csv(folder / "memory.csv")) > 3
    assert {path.name for path in folder.iterdir()} == {"run.json", "log.txt", "memory.csv", "phases.csv"}
    phases = [row["phase"] for row in read_csv(folder / "phases.csv")]
    # load, then per step: generate, score, and for each of the 3 epochs train and optimizer
    assert phases == ["load"] + (["generate", "score"] + ["train", "optimizer"] * 3 + ["train"]) * 2


def test_a_run_with_shared_prompts_records_its_patches_its_passes_and_its_phases(train):
    """`share_prompts` on TRL as released, measured like `stock`."""
    code, record, folder, _ = train("shared", 4)
    assert code == 0 and record["status"] == "ok", record["error"]
    assert record["fork_patches"] == [] and record["trl_file"] == ".build/fork/current-untouched/trl"
    assert record["config"]["completions_per_forward"] == 2
    phases = [(row["phase"], int(row["step"])) for row in read_csv(folder / "phases.csv")]
    updates = ["train", "optimizer"] * 3 + ["train"]
    assert phases == [("load", 0)] + [(phase, step) for step in (1, 2) for phase in ["generate", "score", *updates]]


def test_a_run_in_micro_batches_takes_two_completions_at_a_time(policy, tmp_path):
    config, tokenizer = cfg.resolve("shared-accumulate", 4, "test", "cpu"), AutoTokenizer.from_pretrained(policy)
    reward = policy.replace("policy", "reward")
    trainer, _ = trainers.build_current(config, tmp_path, policy, reward, tokenizer, ["a b c"])
    assert trainer.prompt_sharing.settings == {"prefix_sharing": True, "tokens_per_forward": None}
    assert trainer.args.per_device_train_batch_size == trainer.args.gradient_accumulation_steps == 2


def test_run_ids_name_the_completions_a_pass_only_where_they_are_not_the_usual():
    ids = [cfg.resolve("shared", 8, "cpu", "cpu", completions_per_forward=n).run_id for n in (None, 1, 2, 8)]
    assert ids == ["shared_cpu_k8_r0", "shared_cpu_k8_c1_r0", "shared_cpu_k8_r0", "shared_cpu_k8_c8_r0"]
    usual = {arm: cfg.resolve(arm, 8, "cpu", "cpu").completions_per_forward for arm in ARMS}
    assert (usual["classic-lean"], usual["stock-accumulate"], usual["shared-accumulate"]) == (8, 1, 2)


def test_out_of_memory_is_recorded_with_exit_code_3_and_no_row_lost(train):
    code, record, folder, _ = train("classic-baseline", 8, "--vocab-size", "20000", "--budget", "100MiB")
    assert code == record["exit_code"] == 3
    assert record["status"] == "oom" and "allocate" in record["error"]
    assert record["sampler"]["samples"] == len(read_csv(folder / "memory.csv")) > 3
    assert len(read_csv(folder / "phases.csv")) >= 2 and record["peak_phase"] is not None
    assert "Traceback" in (folder / "log.txt").read_text()


@pytest.fixture
def start(tmp_path):
    """start("train" or "suite", steps) starts one; returns (process, run folder) when the run has trained a little."""
    started = []

    def start(program, steps):
        arms = ["--arm" if program == "train" else "--arms", "classic-lean", "--results", str(tmp_path)]
        command = [sys.executable, "-m", f"experiments.{program}", *arms, *OPTIONS, "--steps", str(steps)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        folder = tmp_path / "here" / RUN
        phases = folder / "phases.csv"
        until(lambda: phases.exists() and phases.read_text().count("optimizer") > 3, started[-1], 120)
        return started[-1], folder

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_run_ends_with_the_suite_that_was_killed_keeps_its_samples_and_nobody_takes_its_folder_before(start, capsys):
    process, folder = start("suite", 3000)
    assert train_module.main(["--arm", "classic-lean", *OPTIONS, "--results", str(folder.parents[1])]) == 2
    assert f"{folder} is being written by another process" in capsys.readouterr().err
    run = psutil.Process(read_record(folder)["pid"])
    (sampler,) = run.children()
    process.kill()
    psutil.wait_procs([run], timeout=120)
    record = read_record(folder)
    assert (record["status"], record["error"]) == ("error", "interrupted by SIGTERM") and not sampler.is_running()
    assert record["trace"] and record["sampler"]["samples"] == len(read_csv(folder / "memory.csv"))
    assert [run.record["status"] for run in stored_runs(folder.parent)] == ["error"]


@pytest.mark.slow
def test_a_lost_sampler_is_said_and_the_peak_is_the_kernels(start):
    process, folder = start("train", 10)
    psutil.Process(process.pid).children()[0].kill()
    out, _ = process.communicate(timeout=120)
    record = read_record(folder)
    assert (process.returncode, record["status"]) == (0, "ok") and "SAMPLER LOST after" in out.splitlines()[-1]
    counted = [int(row["peak_resident_bytes"]) for row in read_csv(folder / "phases.csv") if row["phase"] != "load"]
    assert record["peak_resident_bytes"] == max(counted) > record["start_bytes"]


OF_FOUR = ["--arm", "shared", "--k", "4", "--completions-per-forward"]
STOCK = ["--arm", "stock", "--k", "2"]
BAD = {
    "no number": (["--arm", "stock", "--k", "two"], "'two' is not a whole number"),
    "leave-one-out needs two": (["--arm", "classic-lean", "--k", "1"], "--k 2"),
    "batch not divisible by k": (["--arm", "classic-lean", "--k", "4", "--batch", "6"], "--batch 8"),
    "prompt longer than the positions": ([*STOCK, "--prompt-tokens", "40000"], "32668"),
    "a budget without its unit": ([*STOCK, "--budget", "24"], "did you mean 24GiB?"),
    "no part of k": ([*OF_FOUR, "3", "--arm", "shared-accumulate"], "-accumulate must divide k=4; use 2"),
    "another arm": ([*OF_FOUR, "2", "--arm", "stock"], "2: stock always takes 4; leave the option out or use --arm"),
    "unwritable results": ([*STOCK, "--results", "/proc/nowhere"], "choose another --results"),
    "another folder": ([*STOCK, "--machine", "a/b"], "--machine 'a/b'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_setting_that_cannot_work_gets_one_clear_line(case, tmp_path, capsys):
    arguments, remedy = BAD[case]
    before = list(sys.path)
    code = train_module.main(["--device", "cpu", "--results", str(tmp_path), *arguments])
    assert sys.path == before, "a fork was built for a run that cannot start"
    errors = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(errors) == 1 and errors[0].startswith("train: ") and remedy in errors[0]
    assert not list(tmp_path.rglob("run.json"))


def test_the_options_that_a_suite_hands_over_are_the_run_that_it_planned():
    parser = Parser("train", "", place=False)
    add_settings(parser)
    for config in (
        cfg.resolve("shared", 4, "learn", "cpu", repeat=3, budget_bytes=2**30, completions_per_forward=4),
        cfg.resolve("stock", 2, "seed", "cuda"),
    ):
        words = [word for word in as_words(config) if not word.startswith("--device")]
        assert cfg.resolve(device=config.device, **vars(parser.parse_args(words))) == config


@pytest.mark.parametrize(
    "text, memory",
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa)`", False),
    ],
)
def test_memory_failures_of_torch_its_libraries_and_of_causes_are_told_from_other_errors(text, memory):
    error, other = RuntimeError(text), ValueError("a library fails while it cleans up")
    other.__context__ = error
    assert is_out_of_memory(error) == is_out_of_memory(other) == memory
    other.__suppress_context__ = True  # raised `from None`
    assert not is_out_of_memory(other)


@pytest.mark.slow
def test_bf16_is_mixed_precision_in_both_lines(train):
    """TRL 0.21 under transformers 5 would silently train in float32 instead."""
    for arm in ("classic-baseline", "stock"):
        single, mixed = train(arm, 2)[1]["trace"], train(arm, 2, "--precision", "bf16")[1]["trace"]
        # float32 twice gives 1e-7 at most; how far bf16 goes depends on the tokens it samples
        assert abs(single[0]["grad_norm"] / mixed[0]["grad_norm"] - 1) > 1e-5, arm
