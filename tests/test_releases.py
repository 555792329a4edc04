"""Planner, doctor and launcher on other releases of TRL than the one that is installed."""

import pytest
from releases import release

NEEDS_TRITON = "TRL 1.15 needs Triton for its LM head, so it trains on no CPU: pip install 'trl>=1.16', or use a GPU"


@pytest.mark.slow
def test_planner_doctor_and_launcher_run_on_each_release(probe, policy):
    newest = probe("release", "-", policy)
    with_kernel, oldest = (probe("release", release(version), policy) for version in ("1.15.0", "1.14.2"))
    for found in (newest, with_kernel, oldest):
        assert "nothing is needed" in found["doctor"], found["doctor"]
        assert found["cuda"]["stock-1.14"] == newest["cuda"]["stock-1.14"]
    assert with_kernel["cuda"] == newest["cuda"], "one LM head on a GPU"
    assert oldest["cuda"]["stock"] == oldest["cuda"]["stock-1.14"] > newest["cuda"]["stock"]
    assert [found["reference"] for found in (newest, with_kernel, oldest)] == [2, 4, 4], "bytes beside an object"
    for found in (newest, oldest):
        assert found["parsed"].keys() == {"rloo", "grpo"}
        assert all(set(kinds) == {f"{name.upper()}Config"} for name, kinds in found["parsed"].items()), found["parsed"]
        assert ["\ntrained 2 updates" in said for said in found["trained"]] == [True, True], found["trained"]
        assert ["memory  predicted peak" in said for said in found["trained"]] == [True, False], found["trained"]
    refused = [with_kernel["cpu"], *with_kernel["trained"], *sum(with_kernel["parsed"].values(), [])]
    assert all(line.endswith(NEEDS_TRITON) for line in refused), refused
    assert newest["cpu"]["stock"] != oldest["cpu"]["stock"] and newest["cpu"]["shared"] != oldest["cpu"]["shared"]
