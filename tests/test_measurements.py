"""What all measurements of `experiments.evidence` promise: one line for bad input and for what is missing, tables that
are never half, and going on where they were killed. Nothing is measured here; test_gpu_evidence.py does."""

import csv
from contextlib import nullcontext

import pytest

from experiments import builds
from experiments.config import ROOT
from experiments.evidence import (
    common,
    decoding,
    exactness,
    families_cost,
    group,
    host_allocator_bench,
    planner_check,
    rivals,
    sampler_check,
    worth,
)
from experiments.evidence.gpu import attention_speed, device_facts, kernels, step_profile
from experiments.record import write_csv
from rloo_memory.errors import ConfigError
from visualization.pages.rivals import families_table

ON_A_DEVICE = (exactness, planner_check, sampler_check, attention_speed, device_facts, kernels, step_profile)
ALL = (*ON_A_DEVICE, decoding, families_cost, host_allocator_bench, rivals, worth)
COMMIT = "0123456789ab"


@pytest.fixture
def measure(monkeypatch, tmp_path, capsys):
    """Runs a measurement in this process, as if its code were committed; returns (exit code, stderr)."""
    monkeypatch.setattr(common, "source_commit", lambda: COMMIT)
    monkeypatch.setattr(host_allocator_bench.host_allocator, "find", lambda name: None)

    def run(module, *options):
        device = ["--device", "cpu"] if module in ON_A_DEVICE else []
        code = module.main([*device, "--results", str(tmp_path), "--machine", "x", *options])
        return code, capsys.readouterr().err

    return run


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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
        (exactness, ["--machine", ""], "--machine '' is not"),
        (exactness, ["--results", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (exactness, ["--nonsense"], "--nonsense"),
        (sampler_check, ["--intervals", "x"], "--intervals 'x': write different numbers"),
        (sampler_check, ["--intervals", "nan"], "--intervals 'nan'"),
        (sampler_check, ["--intervals", "0.1,,0.2"], "--intervals '0.1,,0.2'"),
        (sampler_check, ["--intervals", "0.1,0.10"], "--intervals '0.1,0.10'"),
        (sampler_check, ["--intervals", "0.001"], "--interval 0.001"),
        (sampler_check, ["--repeats", "0"], "'0' is not a whole number from 1"),
        (sampler_check, ["--repeats", "nan"], "'nan' is not a whole number"),
        (sampler_check, ["--repeats", "9" * 400], "is not a whole number from 1 to 100"),
        (sampler_check, ["--threads", "0"], "--threads: '0'"),
        (sampler_check, ["--k", "1"], "--k: '1' is not a whole number from 2"),
        (sampler_check, ["--arm", "nope"], "unknown arm 'nope'"),
        (sampler_check, ["--scale", "nope"], "unknown scale 'nope'"),
        (planner_check, ["--cases", "nope"], "unknown case 'nope'"),
        (planner_check, ["--cases", ""], "unknown case ''"),
        (planner_check, ["--cases", "stock-k4,stock-k4"], "case 'stock-k4' is named twice"),
        (rivals, ["--ways", "whole,nope"], "unknown way 'nope'"),
        (rivals, ["--ways", "shared"], "the others are compared with `whole`"),
        (rivals, ["--repeats", "0"], "'0' is not a whole number from 1"),
        (rivals, ["--prompt-tokens", "1"], "'1' is not a whole number from 2"),
        (families_cost, ["--families", "nope"], "unknown family 'nope'"),
        (families_cost, ["--families", "images,images"], "family 'images' is named twice"),
        (families_cost, ["--repeats", "0"], "'0' is not a whole number from 1"),
        (host_allocator_bench, ["--steps", "0"], "'0' is not a whole number from 1"),
        (host_allocator_bench, ["--repeats", "x"], "'x' is not a whole number"),
        (decoding, ["--cells", "100x64"], "write prompt x completion tokens x k, like 2000x256x8"),
        (decoding, ["--cells", "100x64x1"], "k from 2 to 1,000"),
        (decoding, ["--cells", "100x64x8,100x64x8"], "names a cell twice"),
        (decoding, ["--models", "big"], "narrow, wide"),
    ],
)
def test_bad_input_is_one_line_and_touches_no_table(measure, tmp_path, module, options, said):
    code, err = measure(module, *options)
    assert code == 2 and said in err and err.count("\n") == 1 and len(err) < 700, err
    assert not list(tmp_path.rglob("*.csv*"))


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.__name__.rsplit(".")[-1])
def test_packages_that_are_missing_are_named_together_in_one_line(measure, monkeypatch, module):
    monkeypatch.setattr(common, "find_spec", lambda name: None if name in ("torch", "datasets") else True)
    code, err = measure(module)
    assert code == 2 and "torch, datasets; run ./setup_env.sh" in err and err.count("\n") == 1, err


def test_what_only_some_cases_need_is_missed_only_there(measure, monkeypatch):
    monkeypatch.setattr(common, "find_spec", lambda name: None if name == "bitsandbytes" else True)
    monkeypatch.setattr(planner_check, "use_fork", killed_after(0, None))
    code, err = measure(planner_check, "--cases", "stock-k8,stock-k8-adam8")
    assert code == 2 and "bitsandbytes; run ./setup_env.sh" in err and err.count("\n") == 1, err
    with pytest.raises(Killed):  # comes as far as the fork
        measure(planner_check, "--cases", "stock-k8")


def test_a_wheel_that_is_missing_is_named_in_one_line(measure, monkeypatch, tmp_path):
    (tmp_path / "trl").symlink_to(ROOT / "trl")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    monkeypatch.setattr(exactness, "use_fork", builds.use_fork.__wrapped__)
    monkeypatch.setenv("FORK_WHEELS", str(tmp_path / "wheels"))
    code, err = measure(exactness)
    assert code == 2 and ".whl" in err and err.count("\n") == 1, err


def test_a_killed_run_keeps_its_rows_the_old_table_stays_whole_and_the_next_run_goes_on(tmp_path):
    path, columns = tmp_path / "t.csv", ("repeat", "size", "k", "commit")
    facts = {"k": 4, "commit": COMMIT}
    old = common.Table(path, columns, {**facts, "commit": "old"}, fresh=False)
    old.add({"repeat": 0, "size": 1})
    old.finish()
    first = common.Table(path, columns, facts, fresh=False)
    assert not first.rows, "another commit's"
    first.add({"repeat": 0, "size": 2})
    assert [row["commit"] for row in rows_of(path)] == ["old"]
    assert [row["commit"] for row in rows_of(first.unfinished)] == [COMMIT]
    with first.unfinished.open("a") as file:
        file.write("1,7")  # cut off by a kill
    second = common.Table(path, columns, facts, fresh=False)
    assert second.has(repeat=0, size=2) and not second.has(repeat=1)
    second.add({"repeat": 1, "size": 3})
    second.finish()
    assert [(row["repeat"], row["size"], row["k"]) for row in rows_of(path)] == [("0", "2", "4"), ("1", "3", "4")]
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]
    assert common.Table(path, columns, facts, fresh=False).has(repeat=1)
    assert not common.Table(path, columns, facts, fresh=True).rows
    assert not common.Table(path, columns, {**facts, "k": 8}, fresh=False).rows


def test_what_uncommitted_code_measured_is_never_taken_up(tmp_path):
    for commit in ("unknown", f"{COMMIT}-dirty"):
        table = common.Table(tmp_path / "t.csv", ("size", "commit"), {"commit": commit}, fresh=False)
        table.add({"size": 1})
        assert not common.Table(tmp_path / "t.csv", ("size", "commit"), {"commit": commit}, fresh=False).rows


def test_a_table_that_cannot_be_read_is_named_and_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"size,commit\n\xff\xfe,1\n")
    with pytest.raises(ConfigError, match="t.csv"):
        common.Table(path, ("size", "commit"), {"commit": COMMIT}, fresh=False)
    assert path.read_bytes().startswith(b"size")


def errors(stock="1.000e-02", shared="1.050e-02"):
    ways = (("stock", stock), ("shared", shared))
    return [dict(way=way, log_prob_error=error, gradient_error="1.000e-07", attention="flash") for way, error in ways]


@pytest.mark.parametrize(
    "float32, bfloat16, said",
    [
        ("1.000e-06", "1.050e-02", None),
        ("2.000e-05", "1.050e-02", "log_prob_error of shared in float32 is 2.000e-05, bound 1.000e-05"),
        ("1.000e-06", "1.200e-02", "log_prob_error of shared in bfloat16 is 1.200e-02, bound 1.100e-02"),
        ("nan", "1.050e-02", "log_prob_error of shared in float32 is nan, bound 1.000e-05"),
    ],
)
def test_too_large_an_error_leaves_its_rows_and_says_which_bound(
    measure, monkeypatch, tmp_path, float32, bfloat16, said
):
    def compare(device, precision):
        return errors("1.000e-06", float32) if precision == "float32" else errors(shared=bfloat16)

    monkeypatch.setattr(exactness, "use_fork", lambda arm: None)
    monkeypatch.setattr(exactness, "compare", compare)
    code, err = measure(exactness)
    assert (code, err) == ((common.EXIT_VERDICT, f"exactness: larger than it may be: {said}\n") if said else (0, ""))
    assert len(rows_of(tmp_path / "x" / "exactness.csv")) == 4
    monkeypatch.setattr(exactness, "compare", killed_after(0, compare))
    assert measure(exactness) == (code, err), "measured already: the same verdict"


def trained(status="ok", sampler=None, error=None):
    """Stands in for `suite.run_one`: the record of a run that has ended."""

    def run_one(config, machine):
        sizes = {"peak_device_used_bytes": None, "peak_resident_bytes": 9, "start_bytes": 1}
        seen = sampler if sampler is not None else {"achieved_interval_s": config.interval} | SEEN
        return {**sizes, "status": status, "error": error, "sampler": seen}

    return run_one


SEEN = {"longest_gap_s": 0.2, "peak_missed_bytes": 3}


def test_the_sampler_check_goes_on_where_it_was_killed(measure, monkeypatch, tmp_path):
    options = ("--scale", "test", "--repeats", "2", "--intervals", "0.02,0.1", "--threads", "1")
    monkeypatch.setattr(sampler_check, "run_one", killed_after(3, trained()))
    with pytest.raises(Killed):
        measure(sampler_check, *options)
    assert not (tmp_path / "x" / "sampler.csv").exists()
    assert len(rows_of(tmp_path / "x" / "sampler.csv.unfinished")) == 3
    monkeypatch.setattr(sampler_check, "run_one", killed_after(1, trained()))
    assert measure(sampler_check, *options) == (0, "")
    rows = rows_of(tmp_path / "x" / "sampler.csv")
    assert [(row["interval_s"], row["repeat"]) for row in rows] == [
        ("0.02", "0"), ("0.1", "0"), ("0.02", "1"), ("0.1", "1")
    ]  # fmt: skip
    assert [float(row["achieved_interval_s"]) for row in rows] == [0.02, 0.1, 0.02, 0.1]
    assert {row["commit"] for row in rows} == {COMMIT}
    monkeypatch.setattr(sampler_check, "run_one", trained(status="error"))
    assert measure(sampler_check, *options[:-1], "2")[0] == 2, "rows of one thread are not taken for those of two"
    assert rows_of(tmp_path / "x" / "sampler.csv") == rows


@pytest.mark.parametrize(
    "child, said",
    [
        (dict(status="error", error="ValueError: no"), "failed: ValueError: no; "),
        (dict(status="oom"), "failed: oom"),
        (dict(sampler={}), "sampler was lost"),
        (dict(sampler={"lost_after_s": 3.0} | SEEN), "sampler was lost"),
    ],
)
def test_a_run_that_failed_or_that_nobody_sampled_is_no_row(measure, monkeypatch, tmp_path, child, said):
    monkeypatch.setattr(sampler_check, "run_one", trained(**child))
    code, err = measure(sampler_check, "--scale", "test")
    assert code == 2 and said in err and err.count("\n") == 1, err
    assert not list(tmp_path.rglob("sampler.csv*"))


def test_the_planner_check_replaces_case_by_case_and_goes_on_where_it_was_killed(measure, monkeypatch, tmp_path):
    def check(name, *rest):
        sizes = {"predicted_bytes": 11, "measured_bytes": 10, "error": 0.1}
        return [{"phase": phase, **sizes} for phase in planner_check.PHASES]

    monkeypatch.setattr(planner_check, "use_fork", lambda arm: None)
    monkeypatch.setattr(planner_check.models, "build_tokenizer", lambda *rest: None)
    path = tmp_path / "x" / "plan_check.csv"
    path.parent.mkdir()
    columns = planner_check.COLUMNS
    old = [dict.fromkeys(columns, "1") | {"case": case, "commit": "old"} for case in ("stock-k8", "stock-k4", "gone")]
    write_csv(path, columns, old)
    monkeypatch.setattr(planner_check, "check", killed_after(1, check))
    with pytest.raises(Killed):
        measure(planner_check, "--cases", "stock-k4,stock-k8")
    kept = [(row["case"], row["commit"]) for row in rows_of(path)]
    assert kept == [("stock-k4", COMMIT)] * 4 + [("stock-k8", "old"), ("gone", "old")]
    monkeypatch.setattr(planner_check, "check", killed_after(1, check))
    assert measure(planner_check, "--cases", "stock-k4,stock-k8") == (0, "")
    assert [(row["case"], row["commit"]) for row in rows_of(path)][4:] == [("stock-k8", COMMIT)] * 4 + [
        ("gone", "old")
    ]
    assert measure(planner_check, "--cases", "stock-k4") == (0, "")
    with pytest.raises(Killed):
        measure(planner_check, "--cases", "stock-k4", "--fresh")


def test_the_host_allocators_go_on_where_they_were_killed(measure, monkeypatch, tmp_path):
    def train(allocator, model, prompts, out, steps):
        assert not out.exists(), "an older training's figures would be read"
        out.mkdir()
        names = ("peak_resident_bytes", "end_resident_bytes", "seconds", "cpu_seconds")
        return {**dict.fromkeys(names, 2**20), "library": "libc.so.6"}

    monkeypatch.setattr(host_allocator_bench, "prepare", lambda work: "model")
    monkeypatch.setattr(host_allocator_bench, "train", killed_after(5, train))
    with pytest.raises(Killed):
        measure(host_allocator_bench, "--repeats", "2")
    assert len(rows_of(tmp_path / "x" / "host_allocator.csv.unfinished")) == 5
    monkeypatch.setattr(host_allocator_bench, "train", killed_after(3, train))
    assert measure(host_allocator_bench, "--repeats", "2") == (0, "")
    rows = rows_of(tmp_path / "x" / "host_allocator.csv")
    assert len({(row["allocator"], row["repeat"]) for row in rows}) == len(rows) == 8


@pytest.mark.torch
def test_the_rivals_go_on_where_they_were_killed(measure, monkeypatch, tmp_path):
    import torch

    class Group:
        def __init__(self, *sizes):
            self.model = torch.nn.Linear(2, 1)

        def score(self, way):
            self.model(torch.ones(3, 2))

        def train(self, way):
            self.model.zero_grad()
            (self.model(torch.ones(3, 2)).sum() * (2.0 if way == "shared" else 1.0)).backward()

        def gradient(self):
            return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    monkeypatch.setattr(rivals, "use_fork", lambda arm: None)
    monkeypatch.setattr(group, "only_live_memory", nullcontext)
    monkeypatch.setattr(rivals, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(rivals, "Rivals", Group)
    options = ("--ways", "shared,whole", "--repeats", "2", "--prompt-tokens", "8")
    write = rivals.Table.add
    monkeypatch.setattr(rivals.Table, "add", killed_after(3, write))
    with pytest.raises(Killed):
        measure(rivals, *options)
    monkeypatch.setattr(rivals.Table, "add", killed_after(1, write))
    assert measure(rivals, *options) == (0, "")
    rows = rows_of(tmp_path / "x" / "rivals" / "p8_c100_k8.csv")
    assert [(row["way"], row["repeat"]) for row in rows] == [
        ("whole", "0"), ("shared", "0"), ("whole", "1"), ("shared", "1")
    ]  # fmt: skip
    assert [float(row["gradient_difference"]) for row in rows] == [0, 1, 0, 1], "against `whole`, whatever is first"


@pytest.mark.torch
def test_the_families_go_on_where_they_were_killed(measure, monkeypatch, tmp_path):
    import torch

    class Group:
        def __init__(self, model, vocab_size, sizes, image):
            self.model, self.rows = torch.nn.Linear(2, 1), sizes.k if image else 0

        def train(self, way):
            self.model.zero_grad()
            (self.model(torch.ones(3, 2)).sum() * (1.5 if way == "shared" else 1.0)).backward()

        def measure(self, way):
            self.train(way)
            self.encoded = 3 * self.rows if way == "whole" else 3 * self.rows // 8
            return dict.fromkeys(families_cost.PHASE_COLUMNS, 1)

        def peaks(self, way, high_water):
            return {}

        def gradient(self):
            return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    monkeypatch.setattr(families_cost, "use_fork", lambda arm: None)
    monkeypatch.setattr(families_cost, "Group", Group)
    monkeypatch.setattr(families_cost, "build_model", lambda family: None)
    monkeypatch.setattr(families_cost, "keep_freed_memory", lambda: None)
    options = ("--families", "mamba-2,images", "--repeats", "2")
    write = families_cost.Table.add
    monkeypatch.setattr(families_cost.Table, "add", killed_after(10, write))
    with pytest.raises(Killed):
        measure(families_cost, *options)
    monkeypatch.setattr(families_cost.Table, "add", killed_after(6, write))
    assert measure(families_cost, *options) == (0, "")
    rows = rows_of(tmp_path / "x" / "families" / "images.csv")
    assert [(row["way"], row["repeat"]) for row in rows] == [
        (way, repeat) for repeat in "01" for way in ("whole", "shared", "shared-2", "shared-micro-2")
    ]
    assert [row["images_encoded"] for row in rows] == ["24", "3", "3", "3"] * 2
    assert [float(row["gradient_difference"]) for row in rows] == [0, 0.5, 0, 0] * 2
    assert "| 24 |" in families_table(tmp_path / "x")
