"""The vLLM server that generates: looked at before a model loads, and named where it is what ended a training."""

import shlex
import time

from rloo_memory.errors import ConfigError

PROBE = "The quick brown fox said: 17 * 6 = 102."


def url_of(config) -> str | None:
    """Where the server is; None where none generates."""
    if not config.use_vllm or config.vllm_mode != "server":
        return None
    return config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"


def answers(url: str) -> bool:
    import requests

    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.exceptions.RequestException:
        return False


def check(config, model: str, tokenizer) -> None:
    """Wait for the server as long as TRL would, and compare its tokens with the model's, by its tokenizer or its
    processor. Raises `ConfigError` where it does not come, or has another vocabulary."""
    url = url_of(config)
    if url is None or config.process_index > 0:
        return
    revision = (config.model_init_kwargs or {}).get("revision")
    start = f"trl vllm-serve --model {shlex.quote(model)}" + (f" --revision {revision}" if revision else "")
    until = time.monotonic() + config.vllm_server_timeout
    if not answers(url):
        print(f"vllm    waiting for {url}, up to {config.vllm_server_timeout:g} seconds", flush=True)
    while not answers(url):
        if time.monotonic() >= until:
            raise ConfigError(
                f"no vLLM server answers at {url} after vllm_server_timeout {config.vllm_server_timeout:g} seconds; "
                f"start it: {start}"
            )
        time.sleep(1)
    served, tokens = what_it_serves(url)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if tokens is not None and tokens != tokenizer(PROBE)["input_ids"]:
        raise ConfigError(
            f"the vLLM server at {url} serves {served!r}, whose tokens are not those of {model!r}; start it with the "
            f"model that is trained: {start}"
        )
    print(f"vllm    {url} serves {served}", flush=True)


def what_it_serves(url: str) -> tuple[str, list[int] | None]:
    """The model's name, and the tokens of `PROBE`; None from a server that does not say."""
    import requests

    try:
        served = requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        said = requests.post(f"{url}/tokenize", json={"model": served, "prompt": PROBE}, timeout=30)
        return served, said.json()["tokens"] if said.ok else None
    except (requests.exceptions.RequestException, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"what answers at {url} is no vLLM server ({type(error).__name__})") from error
