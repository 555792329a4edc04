"""vLLM in a server, `trl vllm-serve`, which gets new weights before each generation."""

import pytest
from comparison import faults
from launching import check_trained, launch
from training import CASES, train


@pytest.fixture(scope="module")
def url(serve, qwen3):
    return serve(qwen3)


@pytest.mark.parametrize("name", ["rloo", "grpo", "rloo, LoRA", "grpo, parts of groups"])
def test_sharing_trains_the_same(name, url, qwen3, trl, settings_of_server):
    off, on = (train(CASES[name], sharing, qwen3, **settings_of_server(url)) for sharing in (False, True))
    assert not faults(off, on)


def test_the_launcher_trains_with_it(url, qwen3, tmp_path):
    code, said = launch(qwen3, tmp_path, "--vllm_mode", "server", "--vllm_server_base_url", url)
    check_trained(code, said, tmp_path / "out")
    assert "use_vllm: a server generates" in said
