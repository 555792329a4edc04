"""What the bench promises: one line for bad input, samples that no kill takes away, ways that alternate, a way that
fails beside those that do not, and a table that a part of a measurement does not replace. Then what is measured of a
trainer and what it leaves, and that all of it goes on where it was stopped."""

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from experiments import evidence, measuring
from experiments.bench import __main__ as bench
from experiments.bench import alternating, rivals, trainings
from experiments.bench.measurements import MEASUREMENTS, Measurement
from experiments.bench.samples import Cell
from experiments.bench.trainings import Trained
from experiments.config import ROOT
from experiments.measuring import Place
from experiments.record import read_csv
from tests.waiting import until

COMMIT = "0123456789ab"
CELL, OTHER = Cell("wide", 3000, 100, 8), Cell("wide", 200, 100, 8)


@pytest.fixture
def measure(monkeypatch, tmp_path, capsys):
    """Runs the bench in this process, as if its code were committed; returns (exit code, stderr)."""
    monkeypatch.setattr(measuring, "source_commit", lambda: COMMIT)
    monkeypatch.setattr(bench, "in_its_own_process", lambda function, *args: function(*args))
    monkeypatch.setattr(alternating, "use_fork", lambda arm: None)

    def run(*options):
        name, *more = options
        code = bench.main([name, "--device", "cpu", "--results", str(tmp_path), "--machine", "x", *more])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "options, said",
    [
        (["wort"], "unknown measurement 'wort'"),
        (["worth", "--device", "cuda"], "--device cuda: worth is measured on cpu alone"),
        (["rivals", "--ways", "shared"], "the others are compared with `whole`"),
        (["worth", "--cells", "1x1x8"], "write prompt x completion tokens x k, like 3000x100x8"),
        (["families", "--models", "images", "--cells", "500x64x8"], "is too short for images: 1064 or more"),
    ],
)
def test_bad_input_is_one_line_and_touches_no_table(measure, tmp_path, options, said):
    code, err = measure(*options)
    assert code == 2 and said in err and err.count("\n") == 1 and len(err) < 700, err
    assert not list(tmp_path.rglob("*.csv*"))


@pytest.fixture
def clock(monkeypatch):
    """A measurement `clock` of two cells, in these ways. The n-th sample takes 10 + n s, or `seconds` say how many a
    way takes. Returns what is sampled, and these seconds."""

    def put(*ways, **seconds):
        taken = []

        def sample(way):
            taken.append(way)
            took = seconds.get(way, 10 + len(taken))
            if isinstance(took, BaseException):
                raise took
            return {"train_seconds": took, "peak_bytes": 2**20}

        listed = Measurement(
            "-", lambda *of_cell: SimpleNamespace(sample=sample), ways, (CELL, OTHER), ("wide",), 2, 2
        )
        monkeypatch.setitem(MEASUREMENTS, "clock", listed)
        return taken, seconds

    return put


ONE = ("--cells", "3000x100x8")


def table(tmp_path, **wanted):
    return [row for row in read_csv(tmp_path / "x" / "bench.csv") if row.items() >= wanted.items()]


def test_ways_alternate_and_a_way_that_fails_is_a_row_beside_the_others(measure, clock, tmp_path):
    taken, _ = clock("whole", "bad", bad=MemoryError("no room\nat all"))
    assert measure("clock")[0] == 0, "out of memory is an outcome"
    assert taken == ["whole", "bad"] * 4
    rows = table(tmp_path, prompt_tokens="3000")
    assert [(row["way"], row["metric"], row["unit"]) for row in rows] == [
        ("whole", "train_seconds", "s"), ("whole", "peak_bytes", "bytes"), ("bad", "", ""),
    ]  # fmt: skip
    assert [rows[0][name] for name in ("median", "low", "high", "repeats")] == ["12", "11", "13", "2"]
    assert rows[2]["failure"] == "out of memory: MemoryError: no room at all" and rows[2]["median"] == ""
    assert {row["commit"] for row in rows} == {COMMIT}
    clock("whole", "broken", broken=ValueError("a kernel"))
    code, err = measure("clock", *ONE, "--fresh")
    assert code == 1 and "ValueError: a kernel" in err


def test_what_failed_is_tried_again_and_nothing_else(measure, clock, tmp_path):
    taken, seconds = clock("whole", "shared", shared=ImportError("prefix-grouper is not installed"))
    assert measure("clock", *ONE)[0] == 1 and taken == ["whole", "shared"] * 2
    seconds["shared"] = 3  # installed now
    assert measure("clock", *ONE) == (0, "") and taken[4:] == ["shared"] * 2
    assert [row["failure"] for row in table(tmp_path, way="shared")] == [""] * 2


class Killed(BaseException):
    """No `except` sees it, as none sees a kill."""


def test_a_killed_measurement_keeps_its_samples_and_goes_on(measure, clock, tmp_path):
    taken, seconds = clock("whole", "shared", shared=Killed())
    with pytest.raises(Killed):
        measure("clock")
    with (tmp_path / "x" / "bench_samples.jsonl").open("a") as file:
        file.write('\n{"cut off by a ki')
    seconds["shared"] = 3
    assert measure("clock")[0] == 0 and taken.count("whole") == 4 and taken.count("shared") == 5
    assert measure("clock")[0] == 0 and len(taken) == 9, "nothing is measured twice"


def test_a_part_of_a_measurement_does_not_replace_a_whole_one(measure, clock, tmp_path, monkeypatch):
    clock("whole", "shared", "other")
    assert measure("clock", *ONE)[0] == 0
    (tmp_path / "x" / "bench_samples.jsonl").unlink()  # as in a fresh clone
    before = table(tmp_path)
    monkeypatch.setattr(measuring, "source_commit", lambda: "another")
    code, err = measure("clock", *ONE, "--ways", "whole,shared")
    assert code == 0 and "bench.csv keeps its rows of wide, prompt 3,000" in err and table(tmp_path) == before
    assert measure("clock", *ONE, "--fresh") == (0, "") and {row["commit"] for row in table(tmp_path)} == {"another"}


@pytest.mark.slow
def test_a_real_measurement_ends_in_its_table(forked, tmp_path):
    """Each way computes the same gradients; a package that is missing is its way's outcome."""
    ways = ("whole", rivals.GROUPER, "one-row", "shared-2")
    words = f"rivals --models tiny --cells 24x5x4 --repeats 1 --machine x --results {tmp_path}".split()
    result = forked("experiments.bench", *words, "--ways", ",".join(ways), timeout=300)
    rows = {(row["way"], row["metric"]): row for row in table(tmp_path)}
    grouper = [row["failure"] for (way, _), row in rows.items() if way == rivals.GROUPER]
    assert all(not failure or "prefix-grouper is not installed: pip install" in failure for failure in grouper)
    assert result.returncode == int(any(grouper)), result.stderr[-3000:]
    found = {way: float(row["median"]) for (way, metric), row in rows.items() if metric == "gradient_difference"}
    assert found.keys() >= {"whole", "one-row", "shared-2"} and max(found.values()) < 1e-5


def test_every_phase_is_measured_and_nothing_of_a_trainer_stays(tmp_path, monkeypatch):
    subject, alive = Trained(Cell("tiny-qwen3/sampled", 48, 8, 4), (), Place("cpu", tmp_path, {})), []

    def or_out_of_memory(completions, **kwargs):
        """As it is raised, in the middle of a training."""
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        if len(alive) == trainings.STEPS + 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB\nmore")
        return [float(len(text)) for text in completions]

    monkeypatch.setattr("rloo_memory.data.letter_reward", or_out_of_memory)
    for way in ("stock", "stock-accumulate", "shared-micro-2"):
        if way == "stock-accumulate":
            with pytest.raises(torch.OutOfMemoryError):
                subject.sample(way)
            continue
        values = subject.sample(way)
        assert all(values[f"{phase}_seconds"] > 0 for phase in trainings.PHASES)
        assert all(values[f"{phase}_resident_bytes"] > 2**20 for phase in trainings.PHASES)
        assert values["step_seconds"] == pytest.approx(sum(values[f"{phase}_seconds"] for phase in trainings.PHASES))
        assert "train_allocated_bytes" not in values, "a CPU has no such counter"
    assert subject.config.use_cache, "gradient checkpointing switches it off, and the next one would generate without"
    assert alive[3] == alive[4], "nothing of a trainer that ran out of memory stays for the next one"


def test_a_way_whose_peaks_cannot_be_counted_keeps_no_other_one_from_being_measured(tmp_path, monkeypatch):
    def sample(self, way, memory=None):
        if way == "stock":
            raise MemoryError
        return {"step_seconds": 1.0, "train_allocated_bytes": 7 if memory else 0}

    monkeypatch.setattr(Trained, "sample", sample)
    monkeypatch.setattr(trainings, "keep_freed_memory", lambda: None)
    subject = trainings.Alike(Cell("tiny-qwen3/128", 200, 8, 4), trainings.ALIKE_WAYS, Place("cpu", tmp_path, {}))
    with pytest.raises(MemoryError):
        subject.sample("stock")
    assert subject.sample("shared-all")["train_allocated_bytes"] == 7


# What starts the code STAYS, or the script of it
STARTS = {
    "a process of its own": "from experiments.processes import in_its_own_process as run; run(exec, STAYS)",
    "a model family": "from experiments.checks import model_families as models; models.family_check.check = exec; "
                      "list(models.check_all([STAYS], 1))",
    "evidence": "from experiments import evidence; evidence.ITEMS = {'x': SCRIPT}; "
                "evidence.main(['--device', 'cpu', '--machine', 'x', '--results', RESULTS])",
    "sums for the page": "from experiments.fitting.fit_data import in_processes; list(in_processes(exec, [STAYS], 1))",
}  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
def test_what_a_program_starts_ends_with_it_when_it_is_killed(case, tmp_path):
    number, script = tmp_path / "number", tmp_path / "script"
    stays = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script.write_text(f"#!{sys.executable}\n{stays}")
    script.chmod(0o755)
    known = {"STAYS": stays, "SCRIPT": f"./{os.path.relpath(script, ROOT)}", "RESULTS": str(tmp_path)}
    names = "".join(f"{name} = {value!r}\n" for name, value in known.items())
    process = subprocess.Popen([sys.executable, "-c", names + STARTS[case]], cwd=ROOT)
    started = psutil.Process(int(until(lambda: number.exists() and number.read_text(), process)))
    process.kill()
    process.wait()
    until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE)


def test_evidence_measures_what_is_left_and_keeps_its_minutes(tmp_path, monkeypatch, capsys):
    codes, ran = iter([0, 1, 4]), []
    monkeypatch.setattr(measuring, "source_commit", lambda: COMMIT)
    monkeypatch.setattr(evidence, "ITEMS", {"short": "suite --k 2", "step": "./run_bench.sh", "upstream": "{trl}"})
    monkeypatch.setattr(evidence.age, "main", lambda argv: None)

    def run(command, **kwargs):
        ran.append(command)
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(evidence.subprocess, "run", run)
    place = ["--device", "cpu", "--results", str(tmp_path), "--machine", "x"]
    assert evidence.main(place) == 1 and "failed: step" in capsys.readouterr().out
    assert evidence.main(place) == 0 and f"all is measured by {COMMIT}" in capsys.readouterr().out
    assert [command[-5] for command in ran] == ["2", "./run_bench.sh", "./run_bench.sh"]
    rows = read_csv(tmp_path / "x" / "evidence.csv")
    assert [(row["item"], row["exit_code"]) for row in rows] == [("short", "0"), ("step", "4")]
    assert evidence.main([*place, "nothing"]) == 2 and "unknown item" in capsys.readouterr().err
    monkeypatch.setattr(evidence, "ITEMS", {"rivals": "bench rivals"})
    monkeypatch.setattr(evidence.rivals, "PREFIX_GROUPER", "9")
    assert evidence.main(place) == 2 and "pip install prefix-grouper==9" in capsys.readouterr().err
