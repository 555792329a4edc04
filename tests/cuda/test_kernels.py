"""What reaches CUDA's kernels: shapes and dtypes that flash attention takes. How many of them an update launches, and
how often it waits for the device: no more than is on record.

Fewer: record them, results/emulated-cuda/launches.csv is what docs/measuring.md shows."""

import device
import pytest

from experiments.record import read_csv


def test_launches_and_waits_are_no_more_than_recorded(probe):
    """And no copy that is meant not to wait does: from memory that is not pinned, each waits for all that the device
    has been given."""
    (found,) = probe("launches")
    rows = read_csv(device.ROOT / "results" / "emulated-cuda" / "launches.csv")
    recorded = {row.pop("way"): {name: float(x) for name, x in row.items()} for row in rows}
    assert found.keys() == recorded.keys()
    more = {way: found[way] for way, bound in recorded.items() if any(found[way][x] > bound[x] for x in bound)}
    assert not more, f"more than recorded: {more}"
    assert not {way: row["pageable"] for way, row in found.items() if row["pageable"]}


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_flash_attention_takes_every_shape_of_prefix_sharing(probe, capability):
    (found,) = probe("flash", emulate="none", capability=capability)
    assert found["capability"] == [capability // 10, capability % 10]
    assert found["cases"] == 1536 and not found["failed"]
