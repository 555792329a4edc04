"""What all measurements and checks promise: one line for bad input and for what is missing, samples that no kill takes
away, ways that alternate, and a way that fails beside those that do not. Hardly anything is measured here."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from experiments import builds, measuring
from experiments.bench import __main__ as bench
from experiments.bench import alternating, group, random_models, rivals, step_profile
from experiments.bench.group import PHASES, Group, Image, Timed
from experiments.bench.measurements import MEASUREMENTS, Measurement
from experiments.bench.samples import Cell, Samples, read_table
from experiments.checks import device_facts, exactness, kernels, planner_check
from experiments.config import ROOT
from experiments.record import read_csv, write_csv
from rloo_memory.errors import EXIT_TIME
from visualization.tables import render

CHECKS = (exactness, planner_check, device_facts, kernels, step_profile)
COMMIT = "0123456789ab"
FACTS = dict.fromkeys(measuring.FACTS, "x") | {"commit": COMMIT}
CELL, OTHER = Cell("wide", 3000, 100, 8), Cell("wide", 200, 100, 8)


@pytest.fixture
def measure(monkeypatch, tmp_path, capsys):
    """Runs a program in this process, as if its code were committed; returns (exit code, stderr)."""
    monkeypatch.setattr(measuring, "source_commit", lambda: COMMIT)
    monkeypatch.setattr(bench, "in_its_own_process", alternating.measure)
    monkeypatch.setattr(alternating, "use_fork", lambda arm: None)

    def run(module, *options):
        name = () if module in CHECKS else (options[0],)
        more = options[len(name) :]
        code = module.main([*name, "--device", "cpu", "--results", str(tmp_path), "--machine", "x", *more])
        return code, capsys.readouterr().err

    return run


class Killed(BaseException):
    """No `except` sees it, as none sees a kill."""


def killed_after(count, work):
    """`work`, but the call after `count` of them is a kill."""
    calls = []

    def one(*args, **kwargs):
        calls.append(args)
        if len(calls) > count:
            raise Killed
        return work(*args, **kwargs)

    return one


@pytest.mark.parametrize(
    "module, options, said",
    [
        (exactness, ["--device", "gpu"], "unknown device 'gpu'"),
        (exactness, ["--machine", "../../x"], "--machine '../../x' is not"),
        (exactness, ["--results", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (exactness, ["--nonsense"], "--nonsense"),
        (planner_check, ["--cases", "nope"], "unknown case 'nope'"),
        (planner_check, ["--cases", "stock-k4,stock-k4"], "case 'stock-k4' is named twice"),
        (bench, ["wort"], "unknown measurement 'wort'"),
        (bench, ["worth", "--device", "cuda"], "--device cuda: worth is measured on cpu alone"),
        (bench, ["cells-first"], "--device cpu: cells-first is measured on cuda alone"),
        (bench, ["worth", "--models", "big"], "unknown model 'big'"),
        (bench, ["worth", "--models", "wide,wide"], "model 'wide' is named twice"),
        (bench, ["worth", "--models", "tiny"], "--models tiny has no cells of its own here"),
        (bench, ["rivals", "--ways", "whole,nope"], "unknown way 'nope'"),
        (bench, ["rivals", "--ways", "shared"], "the others are compared with `whole`"),
        (bench, ["worth", "--repeats", "0"], "--repeats 0 must be at least 1 and at most 100"),
        (bench, ["worth", "--repeats", "nan"], "'nan' is not a whole number; write it like 4"),
        (bench, ["worth", "--minutes", "-3"], "is no number of minutes"),
        (bench, ["allocators", "--cells", "3000x100x8"], "this measurement has no lengths"),
        *(
            (bench, ["worth", "--cells", cells], "write prompt x completion tokens x k, like 3000x100x8")
            for cells in ("3000", "3000x100", "1x1x8", "0x100x8", "9999999x1x8", "a x b", "", "100x64x1")
        ),
        (bench, ["worth", "--cells", "100x64x8,100x64x8"], "names a cell twice"),
        (bench, ["families", "--models", "images", "--cells", "500x64x8"], "is too short for images: 1064 or more"),
    ],
)
def test_bad_input_is_one_line_and_touches_no_table(measure, tmp_path, module, options, said):
    code, err = measure(module, *options)
    assert code == 2 and said in err and err.count("\n") == 1 and len(err) < 700, err
    assert not list(tmp_path.rglob("*.csv*"))


@pytest.mark.parametrize("module", (bench, *CHECKS), ids=lambda module: module.__name__.rsplit(".")[-1])
def test_packages_that_are_missing_are_named_together_in_one_line(measure, monkeypatch, module):
    monkeypatch.setattr(measuring, "find_spec", lambda name: None if name in ("torch", "datasets") else True)
    code, err = measure(module, *(["worth"] if module is bench else []))
    assert code == 2 and "torch, datasets; run ./setup_env.sh" in err and err.count("\n") == 1, err


def test_what_only_some_cases_need_is_missed_only_there(measure, monkeypatch):
    monkeypatch.setattr(measuring, "find_spec", lambda name: None if name == "bitsandbytes" else True)
    monkeypatch.setattr(planner_check, "find_spec", lambda name: None)
    monkeypatch.setattr(planner_check, "use_fork", killed_after(0, None))
    code, err = measure(planner_check, "--cases", "stock-k8,stock-k8-adam8")
    assert code == 2 and "bitsandbytes; run ./setup_env.sh" in err and err.count("\n") == 1, err
    for options in (("--cases", "stock-k8"), ()):  # comes as far as the fork
        with pytest.raises(Killed):
            measure(planner_check, *options)


def test_a_wheel_that_is_missing_is_named_in_one_line(measure, monkeypatch, tmp_path):
    (tmp_path / "trl").symlink_to(ROOT / "trl")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    monkeypatch.setattr(exactness, "use_fork", builds.use_fork.__wrapped__)
    monkeypatch.setenv("FORK_WHEELS", str(tmp_path / "wheels"))
    code, err = measure(exactness)
    assert code == 2 and ".whl" in err and err.count("\n") == 1, err


class Clock:
    """Stands in for what is measured: the n-th sample takes 10 + n s, `bad` runs out of memory, `broken` fails."""

    def __init__(self, cell, ways, here):
        self.taken = 0

    def sample(self, way):
        self.taken += 1
        if way == "bad":
            raise MemoryError("no room\nat all")
        if way == "broken":
            raise ValueError("a kernel")
        return {"train_seconds": 10 + self.taken, "peak_bytes": 2**20}


@pytest.fixture
def clock(monkeypatch):
    """A measurement `clock` of two cells, in these ways."""

    def put(*ways, near=2):
        listed = Measurement("-", Clock, ways, (CELL, OTHER), ("wide",), 2, near)
        monkeypatch.setitem(MEASUREMENTS, "clock", listed)

    return put


def table(tmp_path, **wanted):
    return [row for row in read_table(tmp_path / "x") if row.items() >= wanted.items()]


def test_ways_alternate_and_a_way_that_fails_is_a_row_beside_the_others(measure, clock, tmp_path, capsys):
    clock("whole", "bad")
    code, err = measure(bench, "clock")
    assert (code, err) == (0, ""), "out of memory is an outcome"
    rows = table(tmp_path, prompt_tokens="3000")
    assert [(row["way"], row["metric"], row["unit"]) for row in rows] == [
        ("whole", "train_seconds", "s"), ("whole", "peak_bytes", "bytes"), ("bad", "", "")
    ]  # fmt: skip
    assert [rows[0][name] for name in ("median", "low", "high", "repeats")] == ["12", "11", "13", "2"]
    assert rows[2]["failure"] == "out of memory: MemoryError: no room at all" and rows[2]["median"] == ""
    assert {row["commit"] for row in rows} == {COMMIT} and len(table(tmp_path)) == 6
    clock("whole", "broken")
    code, err = measure(bench, "clock", "--cells", "3000x100x8", "--fresh")
    assert code == measuring.EXIT_VERDICT and "ValueError: a kernel" in err
    assert table(tmp_path, way="broken")[0]["failure"] == "failed: ValueError: a kernel"
    assert not table(tmp_path, way="bad", prompt_tokens="3000"), "the cell's older rows are replaced"
    assert len(table(tmp_path, way="bad")) == 1, "those of the other cell are not"


def test_seconds_that_are_too_far_apart_are_warned_of(measure, clock, monkeypatch):
    clock("whole")
    seconds = iter((1, 2))
    monkeypatch.setattr(Clock, "sample", lambda self, way: {"train_seconds": next(seconds)})
    code, err = measure(bench, "clock", "--cells", "3000x100x8")
    assert code == 0 and "train_seconds from 1 to 2 in 2 repeats: the machine did other things" in err


def test_ways_that_take_about_as_long_are_repeated_more_often(measure, clock, monkeypatch, tmp_path):
    seconds = {"whole": 10.0, "shared": 5.0, "shared-2": 5.4, "bad": 5.1}
    taken = []

    def sample(self, way):
        taken.append(way)
        if way == "bad":
            raise MemoryError
        return {"train_seconds": seconds[way], "train_cpu_seconds": 10.0, "peak_bytes": 1}

    monkeypatch.setattr(Clock, "sample", sample)
    clock(*seconds, near=4)
    assert measure(bench, "clock", "--cells", "3000x100x8") == (0, "")
    assert taken == list(seconds) * 2 + ["shared", "shared-2"] * 2
    counts = {row["way"]: row["repeats"] for row in table(tmp_path)}
    assert counts == {"whole": "2", "shared": "4", "shared-2": "4", "bad": "2"}
    assert measure(bench, "clock", "--cells", "3000x100x8", "--repeats", "3") == (0, "")
    assert taken[12:] == ["whole", "bad"], "as often as asked, and none again"


def test_a_killed_measurement_keeps_its_samples_and_goes_on(measure, clock, tmp_path, monkeypatch):
    clock("whole", "shared")
    sample = Clock.sample
    monkeypatch.setattr(Clock, "sample", killed_after(3, sample))
    with pytest.raises(Killed):
        measure(bench, "clock")
    assert not table(tmp_path), "no cell is whole"
    with (tmp_path / "x" / "bench_samples.jsonl").open("a") as file:
        file.write('\n{"cut off by a ki')
    samples = Samples(tmp_path / "x", "clock", {"commit": COMMIT})
    assert samples.missing(CELL, ("whole", "shared"), 2, 2) == [(1, "shared")]
    monkeypatch.setattr(Clock, "sample", killed_after(5, sample))
    assert measure(bench, "clock")[0] == 0 and len(table(tmp_path)) == 8
    monkeypatch.setattr(Clock, "sample", killed_after(0, sample))
    assert measure(bench, "clock")[0] == 0, "nothing is measured twice"
    for other in ([*"clock --fresh".split()], [*"clock --repeats 3".split()]):
        with pytest.raises(Killed):
            measure(bench, *other)
    monkeypatch.setattr(measuring, "source_commit", lambda: "other")
    with pytest.raises(Killed):
        measure(bench, "clock")
    assert len(table(tmp_path, commit=COMMIT)) == 8, "the published table stays until a cell is measured anew"


def test_what_uncommitted_code_measured_is_never_taken_up(measure, clock, monkeypatch, tmp_path):
    clock("whole")
    taken = []
    monkeypatch.setattr(Clock, "sample", lambda self, way: taken.append(way) or {"x_ms": 1})
    for commit in ("unknown", f"{COMMIT}-dirty"):
        monkeypatch.setattr(measuring, "source_commit", lambda commit=commit: commit)
        for _ in range(2):
            assert measure(bench, "clock", "--cells", "3000x100x8")[0] == 0
    assert len(taken) == 8 and {row["repeats"] for row in table(tmp_path)} == {"2"}


def test_nothing_is_begun_that_may_take_longer_than_the_minutes(measure, clock, tmp_path, capsys):
    clock("whole")
    assert measure(bench, "clock", "--minutes", "0.9")[0] == EXIT_TIME and not table(tmp_path)
    assert measure(bench, "clock", "--minutes", "1.1")[0] == 0
    assert measure(bench, "clock", "--minutes", "0")[0] == 0, "all is there"
    assert measure(planner_check, "--cases", "shared-k8,stock-k8", "--minutes", "0")[0] == EXIT_TIME


def test_a_device_that_answers_no_more_ends_the_process_and_not_the_measurement(measure, clock, monkeypatch, tmp_path):
    clock("broken", "whole")
    monkeypatch.setattr(alternating, "answers", lambda device: False)
    assert measure(bench, "clock")[0] == EXIT_TIME
    monkeypatch.setattr(alternating, "answers", lambda device: True)
    assert measure(bench, "clock")[0] == measuring.EXIT_VERDICT and len(table(tmp_path, way="whole")) == 4


@pytest.mark.torch
def test_peaks_come_before_times_and_gradients_are_compared_with_whole_rows(monkeypatch):
    import torch

    class Group:
        image, encoded = SimpleNamespace(), 0

        def __init__(self):
            self.model = torch.nn.Linear(2, 1)

        def score(self, way):
            self.encoded += 8 if way == "whole" else 1

        def train(self, way):
            self.score(way)
            self.model.zero_grad()
            (self.model(torch.ones(3, 2)).sum() * (1.5 if way == "shared" else 1.0)).backward()

        def gradient(self):
            return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    done = []
    monkeypatch.setattr(group, "peak_of", lambda work, high_water: done.append("peak") or 7)
    monkeypatch.setattr(group, "keep_freed_memory", lambda: done.append("times"))
    timed = Timed(Group(), ("whole", "shared"), ("score", "train"), peaks=True)
    assert done == ["peak"] * 4 + ["times"]
    whole, shared = (timed.sample(way) for way in ("whole", "shared"))
    assert (whole["gradient_difference"], shared["gradient_difference"]) == (0, 0.5)
    assert (whole["images_encoded"], shared["images_encoded"], shared["train_peak_bytes"]) == (16, 2, 7)


@pytest.mark.torch
def test_an_image_is_encoded_once_a_phase_where_its_prompt_is_shared(monkeypatch, shared_fork):
    monkeypatch.setattr(group, "keep_freed_memory", lambda: None)  # of this process
    monkeypatch.setattr(group, "only_live_memory", nullcontext)
    cell, image = Cell("images", 60, 2, 2), Image(side=8, token=random_models.IMAGE.token)
    images = Group(random_models.build_with_images(), random_models.VOCABULARY, cell, image)
    timed = Timed(images, ("whole", "shared"), PHASES, peaks=True)
    whole, shared = (timed.sample(way) for way in ("whole", "shared"))
    assert (whole["images_encoded"], shared["images_encoded"]) == (6, 3)
    assert shared["gradient_difference"] < 1e-5 and "generate_peak_bytes" in shared


@pytest.mark.slow
@pytest.mark.torch
def test_a_real_measurement_ends_in_its_table(tmp_path):
    """Each way computes the same gradients; a package that is missing is its way's outcome."""
    command = [sys.executable, "-m", "experiments.bench", "rivals", "--models", "tiny", "--cells", "24x5x4"]
    command += ["--repeats", "1", "--results", tmp_path, "--machine", "x"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    rows = {(row["way"], row["metric"]): row for row in table(tmp_path)}
    try:
        rivals.need_grouper()
        code = 0
    except ImportError:
        code = measuring.EXIT_VERDICT
        assert "prefix-grouper is not installed: pip install" in rows[rivals.GROUPER, ""]["failure"]
    assert result.returncode == code, result.stderr[-3000:]
    found = {way: float(row["median"]) for (way, metric), row in rows.items() if metric == "gradient_difference"}
    assert found.keys() >= {"whole", "one-row", "shared", "shared-2"} and max(found.values()) < 1e-5
    text = render("rivals", tmp_path / "x")
    assert "whole rows (stock)" in text and "nan" not in text


def test_the_planner_check_replaces_case_by_case_and_goes_on_where_it_was_killed(measure, monkeypatch, tmp_path):
    def check(name, *rest):
        sizes = {"predicted_bytes": 11, "measured_bytes": 10, "error": 0.1}
        return [{"phase": phase, **sizes} for phase in planner_check.PHASES]

    def rows():
        return [(row["case"], row["commit"]) for row in read_csv(path)]

    monkeypatch.setattr(planner_check, "use_fork", lambda arm: None)
    path = tmp_path / "x" / "plan_check.csv"
    path.parent.mkdir()
    columns = planner_check.COLUMNS
    old = [dict.fromkeys(columns, "1") | {"case": case, "commit": "old"} for case in ("stock-k8", "stock-k4", "gone")]
    write_csv(path, columns, old)
    monkeypatch.setattr(planner_check, "check", killed_after(1, check))
    with pytest.raises(Killed):
        measure(planner_check, "--cases", "stock-k4,stock-k8")
    assert rows() == [("stock-k4", COMMIT)] * 4 + [("stock-k8", "old"), ("gone", "old")]
    monkeypatch.setattr(planner_check, "check", killed_after(1, check))
    assert measure(planner_check, "--cases", "stock-k4,stock-k8") == (0, "")
    assert rows()[4:] == [("stock-k8", COMMIT)] * 4 + [("gone", "old")]
    assert measure(planner_check, "--cases", "stock-k4") == (0, "")
    with pytest.raises(Killed):
        measure(planner_check, "--cases", "stock-k4", "--fresh")
