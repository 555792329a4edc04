"""The attention of completions to a shared prompt: its CUDA kernels without a GPU."""


def test_the_kernels_of_cuda_are_called_as_they_want_and_give_what_those_of_a_cpu_do(probe):
    """Those of a CPU are compared with whole sequences in test_prefix_sharing and in the patch's own tests."""
    result = probe("shared_kernels")
    plain, windows = 2 * 4 + 1, 2 * 5 + 1  # a call for what is behind a prefix, and one for a prefix that is seen
    assert result["calls"] == {"forward": plain + windows + 2, "backward": plain + windows}
    for name, errors in result["errors"].items():
        assert max(errors) < 1e-12, (name, errors)
