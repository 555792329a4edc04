"""How many kernels an update launches, and how often it waits for the device: no more than is on record.

Fewer: record them, results/emulated-cuda/launches.csv is what docs/measuring.md shows."""

import csv

import device
import pytest


@pytest.fixture(scope="module")
def found(probe):
    return probe("launches")[0]


def test_launches_and_waits_are_no_more_than_recorded(found):
    with (device.ROOT / "results" / "emulated-cuda" / "launches.csv").open(newline="") as file:
        recorded = {row.pop("way"): {name: float(x) for name, x in row.items()} for row in csv.DictReader(file)}
    assert found.keys() == recorded.keys()
    more = {way: found[way] for way, bound in recorded.items() if any(found[way][x] > bound[x] for x in bound)}
    assert not more, f"more than recorded: {more}"


def test_no_copy_that_is_meant_not_to_wait_does(found):
    """From memory that is not pinned, each waits for all that the device has been given."""
    assert not {way: row["pageable"] for way, row in found.items() if row["pageable"]}
