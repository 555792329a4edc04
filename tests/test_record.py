"""run.json and runs.jsonl: what is kept, and what a peak is."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from experiments import config as cfg
from experiments import record
from experiments.run_record import PHASE_COLUMNS, RUNS, RunRecord, read_record, stored_runs
from rloo_memory.errors import ConfigError
from rloo_memory.phases import PhasePeak
from tests.test_suite import write_record
from visualization.results import load

GIB = 2**30


def write_run(machine, arm="stock", scale="test", **fields):
    return write_record(machine, cfg.resolve(arm, 2, scale, "cpu"), **fields)


def test_the_file_of_runs_has_what_the_run_folders_have_and_keeps_those_without(tmp_path, capsys):
    here = tmp_path / "here"
    first, second = write_run(here), write_run(here, "shared", "learn", trace=[{"step": 1, "reward": 0.5}])
    (first / "phases.csv").write_text(",".join(PHASE_COLUMNS) + "\ngenerate,1,10,12.5,,,7,\ntrain,1,12.5,")
    record.export(here)
    assert [json.loads(line)["record"]["run_id"] for line in (here / RUNS).read_text().splitlines()] == [
        "shared_learn_k2_r0", "stock_test_k2_r0",
    ]  # fmt: skip
    before = stored_runs(here)
    assert [row["end"] for row in before[1].phases] == [12.5] and before[1].phases[0]["peak_allocated_bytes"] is None
    shutil.rmtree(second)
    shutil.rmtree(first)
    record.export(here)
    assert stored_runs(here) == [replace(run, folder=None) for run in before]
    write_run(here, start_bytes=7)
    record.export(here)
    assert [run.record["start_bytes"] for run in stored_runs(here)] == [GIB, 7]
    assert not capsys.readouterr().err


def test_what_is_finished_stays_until_something_finished_replaces_it(tmp_path):
    """As a run that was begun again does not."""
    folder = write_run(tmp_path)
    kept = read_record(folder)
    assert record.export(tmp_path) == 1
    (folder / "run.json").write_text(json.dumps(kept | {"status": "running", "start_bytes": None}))
    assert record.export(tmp_path) == 1
    assert [run.record for run in stored_runs(tmp_path)] == [kept]


@pytest.mark.parametrize("line", ["<<<<<<< HEAD", '{"other": "tool"}', '{"record": {"arm": "ü"}}'])
def test_a_line_that_is_no_run_is_named_by_whoever_reads_it(line, tmp_path):
    write_run(tmp_path)
    record.export(tmp_path)
    whole = (tmp_path / RUNS).read_bytes()
    (tmp_path / RUNS).write_bytes(whole + line.encode("latin-1"))
    said = f"{tmp_path / RUNS}: line 2 is no run ("
    with pytest.raises(ConfigError, match=re.escape(said)):
        record.export(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(said)):
        load(tmp_path)
    assert (tmp_path / RUNS).read_bytes().startswith(whole)


def test_cuda_peaks_never_fall_below_what_torch_counted(tmp_path):
    """A peak between two samples of the device: torch's pool at its peak plus what the device held besides it."""
    (tmp_path / "memory.csv").write_text(
        "timestamp,elapsed_s,device_used_bytes,process_device_bytes,resident_bytes\n"
        "9,0,9000,,50\n11,2,1500,1200,60\n12,3,2500,2200,70\n13,4,,,80\n"
    )

    class Phases:
        outside_pool_bytes = 500
        peaks = (
            PhasePeak("load", 0, 0, 10, 9000, 9000, 90, 9000),
            PhasePeak("generate", 1, 10, 12, 900, 1000, 60, 1500),
            PhasePeak("train", 1, 12, 14, 2600, 3000, 75, 2500),
        )

    run = RunRecord("id", "stock", "seed", 2, 0, {"interval": 0.05}, "abc", device_kind="cuda")
    record.fill_peaks(run, Phases, tmp_path, sampler_lasted=False)
    assert (run.peak_allocated_bytes, run.peak_reserved_bytes) == (2600, 3000)
    assert run.peak_device_used_bytes == 3500 and run.sampler["peak_missed_bytes"] == 1000
    assert run.peak_process_device_bytes == 2200 and run.peak_resident_bytes == 80
    assert run.peak_phase == "train"
    assert (run.sampler["lost_after_s"], run.sampler["peak_from"]) == (4, "torch's counters")
