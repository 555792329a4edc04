"""What keeps a training from a GPU is said in one line before a model loads: no compiler, an old driver, a GPU without
kernels, one without bfloat16."""

import os
import shutil

import pytest
from conftest import INTERPRETED

TRAIN = ("-m", "experiments.train", "--arm", "shared", "--k", 2, "--scale", "test", "--machine", "here")
LAUNCH = ("-m", "rloo_memory.launch", "balanced", "--max_steps", 1, "--max_completion_length", 8)
MODEL = {"MODEL_PATH": "random:tiny-qwen3"}


@pytest.fixture(params=["launch", "train"])
def program(request, tmp_path):
    """(its name, the words behind `python`) of the launcher, and of a run on the device."""
    on_device = (*TRAIN, "--device", "cuda", "--results", tmp_path)
    return request.param, {"launch": LAUNCH, "train": on_device}[request.param]


@pytest.fixture
def without_gcc(tmp_path):
    """A PATH with all but compilers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        if os.path.isdir(directory):
            for entry in os.scandir(directory):
                (folder / entry.name).unlink(missing_ok=True)
                (folder / entry.name).symlink_to(entry.path)
    for name in ("gcc", "clang", "cc"):
        (folder / name).unlink(missing_ok=True)
    assert not shutil.which("gcc", path=str(folder))
    return {"PATH": str(folder)}


def refused(result, *parts):
    """Ended with exit code 2 and one line that has these parts."""
    assert result.code == 2, result.err[-3000:]
    (line,) = result.err.strip().splitlines()
    assert all(part in line for part in parts), line


def test_the_compiler_that_triton_misses_is_named(on_device, tmp_path, without_gcc, program):
    name, words = program
    result = on_device(*words, cwd=tmp_path, emulate="none", **MODEL, **without_gcc)
    refused(result, f"{name}: Triton", "gcc", "apt-get install gcc")
    assert "model " not in result.out


def test_the_launcher_trains_on_the_cpu_with_a_word_where_the_driver_is_old(on_device, tmp_path):
    result = on_device(*LAUNCH, cwd=tmp_path, emulate="none", fault="old-driver", **MODEL)
    assert result.code == 0, result.err[-3000:]
    (line,) = [line for line in result.out.splitlines() if line.startswith("device  the CPU")]
    assert "driver on your system is too old" in line and "580" in line


def test_a_run_is_measured_on_the_cpu_with_a_word_where_the_driver_is_old(on_device, tmp_path):
    result = on_device(*TRAIN, "--results", tmp_path, emulate="none", fault="old-driver")
    assert result.code == 0, result.err[-3000:]
    assert result.err.count("driver on your system is too old") == 1


def test_a_gpu_without_kernels_is_named(on_device, tmp_path, program):
    name, words = program
    result = on_device(*words, cwd=tmp_path, emulate="none", fault="no-kernels", capability=61, **MODEL)
    refused(result, f"{name}: Emulated sm_61", "6.1", "no kernel", "sm_80")


def test_bfloat16_is_refused_on_turing(on_device, tmp_path):
    result = on_device(*LAUNCH, cwd=tmp_path, emulate="none", capability=75, **MODEL)
    refused(result, "launch: Emulated sm_75", "7.5", "--bf16 false --fp16 true")


def test_set_up_tries_the_gpu(on_device):
    assert on_device("-m", "rloo_memory.cuda_check", emulate="none").code == 0
    result = on_device("-m", "rloo_memory.cuda_check", emulate="none", fault="old-driver")
    assert result.code == 1 and "driver on your system is too old" in result.err


def test_prefix_sharing_does_not_put_a_fault_of_the_device_on_the_model(on_device):
    result = on_device("examples/train_with_prefix_sharing.py", "--steps", 1, emulate="none", fault="no-kernels")
    assert result.code and "no kernel image" in result.err and "does not support Qwen3" not in result.err


def test_in_bfloat16_on_turing_trls_lm_head_fails_with_and_without_sharing(on_device):
    """Which `trl/current/0008` mends; the launcher refuses it before."""
    program = ("examples/train_with_prefix_sharing.py", "--k", 2, "--steps", 1)
    for words in ((), ("--no-prefix-sharing",)):
        result = on_device(*program, *words, capability=75, **INTERPRETED)
        assert result.code and "_addmm_fp32" in result.err and "compute capability 8.0" in result.err.splitlines()[-1]
