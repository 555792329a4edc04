"""The launcher with a profile that has vLLM; with a server: test_server.py."""

from launching import check_trained, launch


def test_colocated(qwen3, tmp_path):
    code, said = launch(qwen3, tmp_path, "--vllm_mode", "colocate")
    check_trained(code, said, tmp_path / "out")
    assert "use_vllm: what vLLM keeps on a CPU comes on top" in said


def test_a_server_that_is_not_there(qwen3, tmp_path):
    url = "http://127.0.0.1:9"
    server = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_server_timeout", "0"]
    code, said = launch(qwen3, tmp_path, *server)
    last = said.splitlines()[-1]
    assert code == 2 and last.startswith(f"launch: no vLLM server answers at {url} after vllm_server_timeout 0"), said
