"""run.json and runs.jsonl: what counts as a record, and that runs.jsonl has what the run folders have."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from experiments import config as cfg
from experiments import memory_monitor, record, train
from experiments.processes import stoppable
from experiments.record import export, write_end
from experiments.run_record import PHASE_COLUMNS, RUNS, RunRecord, read_record, read_rows, stored_runs
from rloo_memory import phases
from rloo_memory.errors import ConfigError
from rloo_memory.folder_lock import owned
from tests.test_suite import write_record as write_finished

GIB = 2**30


def write_run(machine, arm="stock", scale="test", **fields):
    return write_finished(machine, cfg.resolve(arm, 2, scale, "cpu"), **fields)


def run_ids(machine):
    return [json.loads(line)["record"]["run_id"] for line in (machine / RUNS).read_text().splitlines()]


def test_the_file_of_runs_has_what_the_run_folders_have_and_keeps_those_without(tmp_path, capsys):
    here = tmp_path / "here"
    first, second = write_run(here), write_run(here, "shared", "learn", trace=[{"step": 1, "reward": 0.5}])
    (first / "phases.csv").write_text(",".join(PHASE_COLUMNS) + "\ngenerate,1,10,12.5,,,7,\ntrain,1,12.5,")
    assert record.main([str(here)]) == 0
    assert run_ids(here) == ["shared_learn_k2_r0", "stock_test_k2_r0"]
    before = stored_runs(here)
    assert [row["end"] for row in before[1].phases] == [12.5] and before[1].phases[0]["peak_allocated_bytes"] is None
    shutil.rmtree(second)
    shutil.rmtree(first)
    assert record.main([str(here)]) == 0
    assert stored_runs(here) == [replace(run, folder=None) for run in before]
    write_run(here, start_bytes=7)
    assert record.main([str(here)]) == 0
    assert [run.record["start_bytes"] for run in stored_runs(here)] == [GIB, 7]
    export(tmp_path / "nothing was run here")
    assert not (tmp_path / "nothing was run here").exists()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "field", [{"run_id": "shared_test_k2_r0"}, {"k": "2"}, {"status": "fine"}, {"peak_resident_bytes": None}]
)
def test_a_record_that_is_none_is_named_and_the_others_count(field, tmp_path, capsys):
    """Of a copied folder, or of another version. What a kill leaves of one: test_damaged_results."""
    write_run(tmp_path, "shared")
    folder = write_run(tmp_path)
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), **field}))
    assert export(tmp_path) == 1 and run_ids(tmp_path) == ["shared_test_k2_r0"]
    (said,) = capsys.readouterr().err.splitlines()
    assert str(folder / "run.json") in said and "delete that folder" in said
    assert read_record(folder) is None


def test_a_full_disk_leaves_a_small_record_that_says_so(tmp_path, monkeypatch):
    folder = write_run(tmp_path, status="running", launch="mine")
    small = (folder / "run.json").stat().st_size

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record, "write_json", full)
    run = RunRecord(**read_record(folder))
    run.status, run.exit_code, run.trace = "ok", 0, [{"step": number} for number in range(1000)]
    write_end(run, folder)
    left = read_record(folder)
    assert (left["status"], left["exit_code"], run.exit_code) == ("error", 1, 1)
    assert "is full" in left["error"] and str(folder) in left["error"] and left["trace"] == []
    assert (folder / "run.json").stat().st_size < small + 300, "it must fit where the first record was"


def test_a_record_is_not_written_into_another_launchs_folder(tmp_path):
    folder = write_run(tmp_path, status="running", launch="another")
    mine = RunRecord(**{**read_record(folder), "launch": "mine", "status": "ok"})
    with pytest.raises(OSError, match="removed or replaced"):
        write_end(mine, folder)
    assert read_record(folder)["launch"] == "another"
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="removed or replaced"):
        write_end(mine, folder)


def test_a_folder_is_owned_by_one(tmp_path):
    with owned(tmp_path / "run"), pytest.raises(ConfigError, match=f"written by process {os.getpid()} "):
        with owned(tmp_path / "run", patience=0.2):
            pass
    assert not (tmp_path / "run").exists(), "nothing was left in it"
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "run.json").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"], "no lock file is left"
    remedy = "--output_dir other"
    with pytest.raises(ConfigError, match=f"cannot write to .*; choose {remedy}$"):
        with owned(tmp_path / "run" / "run.json", remedy=remedy):
            pass


def test_a_clock_that_is_set_meanwhile_bends_no_duration(tmp_path, monkeypatch):
    """Back by an hour at every reading: samples and phases go on from where they began, on one clock."""
    real, readings = time.time(), []

    def jumping():
        readings.append(None)
        return real - 3600 * (len(readings) - 1)

    recorder = phases.PhaseRecorder(tmp_path / "phases.csv", "cpu")
    monkeypatch.setattr(time, "time", jumping)
    for phase in ("generate", "score", "train"):
        recorder.enter(phase)
    recorder.close()
    spans = [(peak.start, peak.end) for peak in recorder.peaks]
    assert all(0 <= stop - start < 60 for start, stop in spans) and spans == sorted(spans)
    readings.clear()
    read, write = os.pipe()
    with open(tmp_path / "memory.csv", "wb", buffering=0) as output:
        threading.Timer(0.25, lambda: os.write(write, b"x")).start()
        memory_monitor.sample(psutil.Process(), output, 0.05, None, read)
    stamps = [row["timestamp"] for row in read_rows(tmp_path / "memory.csv")]
    assert len(stamps) >= 3 and stamps == sorted(stamps) and abs(stamps[0] - real) < 60


@pytest.mark.parametrize("exact, status", [(True, "ok"), (False, "error")])
def test_a_run_without_its_sampler_counts_only_where_the_kernel_knows_the_peak(exact, status, tmp_path, monkeypatch):
    config = cfg.resolve("stock", 2, "test", "cpu")
    run = record.new_record(config, "abc", device_kind="cpu", start_bytes=1)
    if not exact:
        monkeypatch.setattr(phases.HighWater, "reset", lambda self: False)
    monkeypatch.setattr(train, "start_monitor", lambda *_: None)
    monkeypatch.setattr(train, "stop_monitor", lambda _: None)
    monkeypatch.setattr(train, "train", lambda config, documents, run, recorder: recorder.enter("generate"))
    with stoppable():
        train.measure(tmp_path, config, [], run, SimpleNamespace(phase=lambda phase, step: None))
    assert (run.status, run.exit_code) == (status, 0 if exact else 1)
    assert run.sampler["lost_after_s"] == 0 and (run.peak_resident_bytes is not None) == exact
    assert run.error is None if exact else "the sampler was lost" in run.error
