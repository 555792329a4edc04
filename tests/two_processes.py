"""Runs a launcher that starts two processes of its own, and leaves none behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str], seconds: float = 240, **environment: str) -> tuple[int, str]:
    """(exit code, what all of them printed), without a GPU. After `seconds` they are ended; the exit code says so."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its processes, which are in sessions of their own
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, output


def launched(config: str, program: tuple[str, ...], *words, seconds: float = 240, **environment) -> tuple[int, str]:
    """The same of `accelerate launch` with a file of settings/accelerate."""
    command = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--main_process_port", "0", "--config_file", f"rloo_memory/settings/accelerate/{config}.yaml"]
    return run([*command, *program, *map(str, words)], seconds, PYTHONPATH=str(ROOT), **environment)
