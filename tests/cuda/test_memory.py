"""What torch's own CUDA allocator counts: cuBLAS's workspaces, the planner's trainings, and what a training leaves."""

import json

import device
import planner
import pytest

from experiments.record import read_csv
from rloo_memory.plan.accuracy.reserve import WORKSPACES


@pytest.mark.parametrize("capability, mib", [(75, 8), (80, 8), (90, 32), (100, 32), (120, 32)])
def test_the_planner_sets_cublas_workspaces_aside(probe, capability, mib):
    (found,) = probe("workspaces", emulate="none", capability=capability)
    product, with_bias, backward = found["mib"]
    assert product == with_bias == pytest.approx(mib, abs=0.2), "of the forward's handle"
    assert backward == pytest.approx(2 * mib, abs=0.4), "and of the backward's"
    assert backward * 2**20 <= WORKSPACES * 1.001


@pytest.mark.parametrize("case", ["shared-parts-lora", "stock-k8-lora", "stock-k8"])
def test_the_planner_is_near_the_allocator_as_recorded(case):
    """One of each kind, and one whose attention holds all scores; all are in results/emulated-cuda/planner.csv."""
    found = planner.in_a_process(case, expandable=True)
    rows = read_csv(planner.TABLE)
    (recorded,) = (row for row in rows if row["case"] == case and row["expandable_segments"] == "True")
    for name in ("predicted_bytes", "allocated_bytes", "reserved_bytes"):
        assert found[name] == pytest.approx(int(recorded[name]), rel=0.02), name
    within = (found["allocated_bytes"] - WORKSPACES) / found["predicted_bytes"]
    assert 0.97 < within < 1.03


def test_a_model_kept_on_the_host_leaves_the_device_when_the_policy_trains(probe):
    (found,) = probe("kept")
    assert (found["scoring"], found["training"]) == ("cuda", "cpu") and found["error"] < 1e-4
    assert found["mib_less"] > 3.8, "a million weights in float32"
    assert found["copies_to_host"] == 0 and found["same_memory"], "nothing has changed that would be copied back"


def test_activation_offloading_leaves_nothing_on_the_device(on_device):
    out = on_device(device.HERE / "probes" / "left.py", emulate="ints").out
    found = json.loads(out.splitlines()[-1])  # behind the trainers' logs
    assert found["mib_at_the_end_of_training"] <= found["without_offloading"] + 1
    assert found["mib_after_the_trainer_is_gone"] < 1
