"""What reaches CUDA's kernels: shapes and dtypes that flash attention takes, and which backend sdpa picks."""

import pytest


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_flash_attention_takes_every_shape_of_prefix_sharing(probe, capability):
    (found,) = probe("flash", emulate="none", capability=capability)
    assert found["capability"] == [capability // 10, capability % 10]
    assert found["cases"] == 1536 and not found["failed"]
