"""The launcher with a profile that has vLLM; with a server: test_server.py."""

from launching import check_trained, launch


def test_colocated(qwen3, tmp_path):
    code, said = launch(qwen3, tmp_path, "--vllm_mode", "colocate")
    check_trained(code, said, tmp_path / "out")
    assert "use_vllm: what vLLM keeps on a CPU comes on top" in said
