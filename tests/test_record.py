"""run.json and summary.csv: what counts as a record, and that summary.csv follows the run folders."""

import csv
import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments import config as cfg
from experiments import memory_monitor, record, train
from experiments.config import ROOT
from experiments.processes import stoppable
from experiments.record import RunRecord, damage, read_record, write_summary
from rloo_memory import phases
from rloo_memory.errors import ConfigError
from rloo_memory.folder_lock import owned

GIB = 2**30


def write_run(machine, arm="stock", scale="test", **fields):
    config = cfg.resolve(arm, 2, scale, "cpu")
    folder = machine / config.run_id
    folder.mkdir(parents=True)
    identity = (config.run_id, config.arm, config.scale, config.k, config.repeat, config.as_dict())
    usual = dict(commit="abc", status="ok", start_bytes=GIB, peak_resident_bytes=3 * GIB, device_kind="cpu")
    RunRecord(*identity, **{**usual, **fields}).write(folder)
    return folder


def run_ids(machine):
    with (machine / "summary.csv").open(newline="") as file:
        return [row["run_id"] for row in csv.DictReader(file)]


def test_the_summary_follows_the_run_folders(tmp_path, capsys):
    here = tmp_path / "here"
    first, second = write_run(here), write_run(here, "shared", "learn", trace=[{"step": 1, "reward": 0.5}])
    assert record.main([str(here)]) == 0
    assert run_ids(here) == ["shared_learn_k2_r0", "stock_test_k2_r0"]
    assert (here / "convergence" / "shared.csv").read_text().count("\n") == 2
    shutil.rmtree(second)
    assert record.main([str(here)]) == 0
    assert run_ids(here) == ["stock_test_k2_r0"]
    assert not (here / "convergence" / "shared.csv").exists(), "the curve of a run that is gone"
    shutil.rmtree(first)
    assert record.main([str(here)]) == 0 and run_ids(here) == []
    write_summary(tmp_path / "nothing was run here")
    assert not (tmp_path / "nothing was run here").exists()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("machine", sorted(path.parent for path in (ROOT / "results").glob("*/summary.csv")))
def test_the_committed_summaries_are_what_their_run_folders_give(machine, tmp_path, capsys):
    copy = tmp_path / machine.name
    for path in machine.glob("*/run.json"):
        (copy / path.parent.name).mkdir(parents=True)
        shutil.copy(path, copy / path.parent.name)
    records = write_summary(copy)
    assert len(records) == len(list(machine.glob("*/run.json"))) > 50 and not capsys.readouterr().err
    for name in ("summary.csv", *(f"convergence/{path.name}" for path in (machine / "convergence").iterdir())):
        assert (copy / name).read_text() == (machine / name).read_text(), name


DAMAGE = {
    "a list": [1, 2],
    "a number": 7,
    "nothing but a status": {"status": "ok"},
    "none": None,
    "another run's": {"run_id": "shared_test_k2_r0"},
    "k is a fraction": {"k": 2.7},
    "k is text": {"k": "2"},
    "k is negative": {"k": -3},
    "an unknown status": {"status": "fine"},
    "no peak": {"peak_resident_bytes": None},
    "a peak beyond reason": {"peak_resident_bytes": 10**400},
    "a peak that is no number": {"peak_resident_bytes": float("nan")},
    "no start level": {"start_bytes": None},
    "no configuration": {"config": [1]},
    "no trace": {"trace": 5},
    "tokens in words": {"prompt_tokens_fed_mean": "many"},
    "a sampler that is none": {"sampler": [3]},
    "a sampler lost at no time": {"sampler": {"lost_after_s": None}},
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_record_that_is_none_is_named_and_the_others_count(case, tmp_path, capsys):
    write_run(tmp_path, "shared")
    folder = write_run(tmp_path)
    value = DAMAGE[case]
    if isinstance(value, dict) and value != {"status": "ok"}:
        value = {**json.loads((folder / "run.json").read_text()), **value}
    (folder / "run.json").write_text(json.dumps(value))
    assert [found["run_id"] for found in write_summary(tmp_path)] == ["shared_test_k2_r0"] == run_ids(tmp_path)
    (said,) = capsys.readouterr().err.splitlines()
    assert str(folder / "run.json") in said and "delete that folder" in said
    assert read_record(folder) is None


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 10**5, "\ud800"])
def test_text_that_is_no_json_is_damage_too(text, tmp_path, capsys):
    folder = write_run(tmp_path)
    (folder / "run.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert read_record(folder) is None and write_summary(tmp_path) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_a_whole_record_has_no_damage(tmp_path):
    folder = write_run(tmp_path)
    assert damage(json.loads((folder / "run.json").read_text()), folder) is None


def test_a_full_disk_leaves_a_small_record_that_says_so(tmp_path, monkeypatch):
    folder = write_run(tmp_path, status="running", launch="mine")
    small = (folder / "run.json").stat().st_size

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record, "write_json", full)
    run = RunRecord(**read_record(folder))
    run.status, run.exit_code, run.trace = "ok", 0, [{"step": number} for number in range(1000)]
    run.write_end(folder)
    left = read_record(folder)
    assert (left["status"], left["exit_code"], run.exit_code) == ("error", 1, 1)
    assert "is full" in left["error"] and str(folder) in left["error"] and left["trace"] == []
    assert (folder / "run.json").stat().st_size < small + 300, "it must fit where the first record was"


def test_a_record_is_not_written_into_another_launchs_folder(tmp_path):
    folder = write_run(tmp_path, status="running", launch="another")
    mine = RunRecord(**{**read_record(folder), "launch": "mine", "status": "ok"})
    with pytest.raises(OSError, match="removed or replaced"):
        mine.write_end(folder)
    assert read_record(folder)["launch"] == "another"
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="removed or replaced"):
        mine.write_end(folder)


def test_a_folder_is_owned_by_one(tmp_path):
    with owned(tmp_path / "run"), pytest.raises(ConfigError, match=f"written by process {os.getpid()} "):
        with owned(tmp_path / "run", patience=0.2):
            pass
    assert not (tmp_path / "run").exists(), "nothing was left in it"
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "run.json").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"], "no lock file is left"


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
    stamps = [row["timestamp"] for row in record.read_samples(tmp_path / "memory.csv")]
    assert len(stamps) >= 3 and stamps == sorted(stamps) and abs(stamps[0] - real) < 60


def test_the_last_row_of_a_full_disk_is_left_out(tmp_path):
    (tmp_path / "memory.csv").write_text("timestamp,elapsed_s,resident_bytes\n1,0,5\n2,1,\n3,2")
    assert [row["resident_bytes"] for row in record.read_samples(tmp_path / "memory.csv")] == [5.0, None]
    assert record.read_samples(Path(tmp_path, "none.csv")) == []


@pytest.mark.parametrize("exact, status", [(True, "ok"), (False, "error")])
def test_a_run_without_its_sampler_counts_only_where_the_kernel_knows_the_peak(exact, status, tmp_path, monkeypatch):
    config = cfg.resolve("stock", 2, "test", "cpu")
    identity = (config.run_id, config.arm, config.scale, config.k, config.repeat, config.as_dict(), "abc")
    run = RunRecord(*identity, device_kind="cpu", start_bytes=1)
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
