"""A vLLM server that the trainer is to use: looked for before anything is loaded."""

import time
import urllib.error
import urllib.request

from rloo_memory.errors import ConfigError
from rloo_memory.launch.output import decided_once

EVERY = 2.0  # seconds between two attempts


def wait_for(config) -> None:
    """Until the server answers, where a server generates. Raises `ConfigError` after `vllm_server_timeout` seconds."""
    if config.use_vllm and config.vllm_mode == "server":
        url = config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
        decided_once(config, lambda: wait_for_answer(url.rstrip("/"), config.vllm_server_timeout))


def wait_for_answer(url: str, seconds: float) -> None:
    began, reason = time.monotonic(), failure(url)
    if reason:
        print(f"vllm    waiting for the server at {url}, {seconds:g} s at most ({reason})", flush=True)
    while reason and time.monotonic() - began < seconds:
        time.sleep(min(EVERY, seconds))
        reason = failure(url)
    if reason:
        raise ConfigError(
            f"no vLLM server answers at {url} within {seconds:g} s (vllm_server_timeout): {reason}; start it with "
            "trl vllm-serve --model MODEL, name it with --vllm_server_base_url, or take --vllm_mode colocate"
        )


def failure(url: str) -> str | None:
    """Why the server does not answer; None where it does."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except (OSError, ValueError) as error:  # also a status that is an error; ValueError: no URL
        return str(error)
