"""vLLM in a server, `trl vllm-serve`, which gets new weights before each generation."""

import time

import pytest
import tiny_models
from comparison import faults
from launching import check_trained, free_port, launch, start
from training import CASES, train

from rloo_memory import models


@pytest.fixture(scope="module")
def url(serve, qwen3):
    return serve(qwen3)


@pytest.mark.parametrize("name", ["rloo", "grpo", "rloo, LoRA", "grpo, parts of groups"])
def test_sharing_trains_the_same(name, url, qwen3, trl):
    server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 60.0}
    server |= {"generation_kwargs": {"seed": 7}}
    # The store of an earlier trainer keeps its port
    off, on = (train(CASES[name], sharing, qwen3, **server, vllm_group_port=free_port()) for sharing in (False, True))
    assert not faults(off, on)


def test_the_launcher_trains_with_it(url, qwen3, tmp_path):
    code, said = launch(qwen3, tmp_path, "--vllm_mode", "server", "--vllm_server_base_url", url)
    check_trained(code, said, tmp_path / "out")
    assert "use_vllm: a server generates" in said


def test_a_server_with_other_tokens_is_refused_before_the_model_loads(url, tmp_path):
    other = tiny_models.save_text(tmp_path / "other")
    models.build_tokenizer(["17 and 18 make 35"], 400).save_pretrained(other)
    server = ["--vllm_mode", "server", "--vllm_server_base_url", url]
    code, said = launch(other, tmp_path, *server, "--prompt_tokens", "80")
    assert code == 2 and "whose tokens are not those of" in said.splitlines()[-1], said[-3000:]


def test_a_server_that_dies_is_one_line_with_the_way_to_go_on(serve, qwen3, tmp_path):
    url = serve(qwen3)
    server = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_group_port", str(free_port())]
    training = start(qwen3, tmp_path, *server, "--max_steps", "200", "--save_steps", "1", "--save_total_limit", "2")
    while not (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").exists():
        assert training.poll() is None, (tmp_path / "said").read_text()[-3000:]
        time.sleep(0.2)
    serve.kill_last()
    assert training.wait(300) == 2
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"launch: the vLLM server at {url} stopped answering in update "), said[-3000:]
    assert last.endswith(" with --resume_from_checkpoint true"), last


def test_a_server_that_is_not_there(qwen3, tmp_path):
    url = "http://127.0.0.1:9"
    server = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_server_timeout", "0"]
    code, said = launch(qwen3, tmp_path, *server)
    last = said.splitlines()[-1]
    assert code == 2 and last.startswith(f"launch: no vLLM server answers at {url} after vllm_server_timeout 0"), said
