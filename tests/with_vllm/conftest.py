"""`make test-vllm`: real vLLM on a CPU. Elsewhere, where there is no vLLM, nothing here is collected."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    sys.path[:0] = [str(HERE), str(HERE.parent / "probes")]
    import tiny_models
    import vllm_on_cpu
    from launching import free_port

    os.environ.update(vllm_on_cpu.VARIABLES)


@pytest.fixture(scope="session")
def trl():
    """TRL with what it needs for vLLM on a CPU."""
    vllm_on_cpu.colocated()
    vllm_on_cpu.to_server()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    return tiny_models.save_text(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def falcon_h1(tmp_path_factory):
    mixer = dict(mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1)
    return tiny_models.save_text(tmp_path_factory.mktemp("falcon_h1"), "falcon_h1", **mixer)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory):
    return tiny_models.save_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Starts `trl vllm-serve` for a model's folder, until the module's tests are done; returns its URL."""
    running = []

    def kill_last():
        os.killpg(running[-1].pid, signal.SIGKILL)

    def start(model: Path, *options: str) -> str:
        port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
        command = [sys.executable, "-m", "trl.cli.main", "vllm-serve", "--model", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--enforce_eager", "--dtype", "float32", "--max_model_len", "512", *options]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        running.append(process)
        url = f"http://127.0.0.1:{port}"
        for _ in range(180):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                return url
            except OSError:
                time.sleep(1)
        raise TimeoutError(log.read_text()[-3000:])

    start.kill_last = kill_last
    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
