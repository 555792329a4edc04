"""vLLM in a server, `trl vllm-serve`, which gets new weights before each generation."""

import pytest
from comparison import faults
from training import CASES, train


@pytest.fixture(scope="module")
def url(serve, qwen3):
    return serve(qwen3)


@pytest.mark.parametrize("name", ["rloo", "grpo", "rloo, LoRA", "grpo, parts of groups"])
def test_sharing_trains_the_same(name, url, qwen3, trl, settings_of_server):
    off, on = (train(CASES[name], sharing, qwen3, **settings_of_server(url)) for sharing in (False, True))
    assert not faults(off, on)
