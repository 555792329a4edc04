"""How many kernels an update launches, and how often it waits for the device: no more than is on record.

Fewer: record them, results/emulated-cuda/launches.csv is what docs/emulated_cuda.md shows."""

import csv

import device


def test_launches_and_waits_are_no_more_than_recorded(probe):
    (found,) = probe("launches")
    with (device.ROOT / "results" / "emulated-cuda" / "launches.csv").open(newline="") as file:
        recorded = {
            row.pop("way"): {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)
        }
    assert found.keys() == recorded.keys()
    more = {way: values for way, values in found.items() if any(values[x] > recorded[way][x] for x in values)}
    assert not more, f"more than recorded: {more}"
