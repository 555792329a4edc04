"""Cells of real shapes at small size: every way to train, a cell that runs out of memory, minutes, and their table."""

import csv
import gc
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.evidence import common, planner_check, sampler_check
from experiments.evidence.common import EXIT_TIME, EXIT_VERDICT
from experiments.evidence.gpu import attention_speed, expected_peaks, kernels, shape_cells, step_profile
from experiments.evidence.gpu.plans import ON_CPU, PLANS, SMALL, WAYS, Cell, Plan
from experiments.record import write_csv
from rloo_memory.errors import ConfigError
from rloo_memory.phases import PhaseRecorder
from visualization.files import LoadError
from visualization.tables import render

CELL = Cell(*SMALL, "ragged", "shared-2", **ON_CPU)
FACTS = dict.fromkeys(common.FACTS, "x")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs a measurement in this process, as one commit; returns its exit code."""
    monkeypatch.setattr(common, "source_commit", lambda: "abc")

    def run(module, *options):
        return module.main(["--device", "cpu", "--results", str(tmp_path), "--machine", "x", *options])

    return run


def plan(monkeypatch, *cells, **more):
    monkeypatch.setitem(PLANS, "small", Plan(cells, **{"steps": 1, "stated_s": 20} | more))


def rows_of(tmp_path, name="cells/small.csv"):
    with (tmp_path / "x" / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.torch
def test_ways_alternate_and_one_that_runs_out_of_memory_is_a_row_and_the_next_goes_on(
    command, tmp_path, monkeypatch, capsys
):
    import torch
    from transformers import PreTrainedModel

    stock, shared = replace(CELL, way="stock", completions="sampled"), replace(CELL, completions="sampled")
    accumulate = replace(shared, way="stock-accumulate")
    plan(monkeypatch, stock, accumulate, shared, visits=2)
    measure, given, trained, alive = shape_cells.Bench.measure, shape_cells.Completions.given, [], []

    def measured(self, cell, steps):
        trained.append(cell.way)
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        return measure(self, cell, steps)

    def or_out_of_memory(self):
        """As it is raised, in the middle of a training."""
        if self.cell.way == "stock-accumulate":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB\nmore")
        return given(self)

    monkeypatch.setattr(shape_cells.Bench, "measure", measured)
    monkeypatch.setattr(shape_cells.Completions, "given", or_out_of_memory)
    assert command(shape_cells, "--plan", "small", "--minutes", "0") == EXIT_TIME and not trained
    assert "not begun" in capsys.readouterr().out
    assert command(shape_cells, "--plan", "small") == 0
    assert trained == ["stock", "stock-accumulate", "shared-2"] * 2
    assert max(alive) == alive[0], "nothing of a trainer stays for the next one"
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["ok", "oom", "ok"] * 2 and [row["visit"] for row in rows] == [*"000111"]
    assert rows[1]["error"].startswith("OutOfMemoryError: CUDA out of memory.") and not rows[1]["train_seconds"]
    for row in (rows[0], rows[2]):
        assert all(float(row[f"{phase}_seconds"]) > 0 for phase in shape_cells.PHASES)
        assert all(int(row[f"{phase}_resident_bytes"]) > 2**20 for phase in shape_cells.PHASES)
        assert row["train_allocated_bytes"] == "" and row["device_kind"] == "cpu"
    assert (rows[0]["attention"], rows[2]["attention"]) == ("", "kernels")
    assert command(shape_cells, "--plan", "small") == 0 and len(trained) == 6, "measured once"
    text = render("cells", tmp_path / "x")
    assert text.startswith("*CPU: ") and "| `stock-accumulate` | out of memory |" in text
    assert "tiny-qwen3, P = 48, C = 8, k = 4, completions sampled:" in text


@pytest.mark.torch
@pytest.mark.parametrize("lora_rank", (0, 4))
def test_the_prompt_is_computed_within_generation(command, monkeypatch, lora_rank):
    """Once a rollout, with LoRA through the base model alone."""
    from experiments.builds import use_fork
    from rloo_memory.arms import ARMS

    use_fork(ARMS["shared"])
    from trl.generation import shared_prefix

    recorders, passes = [], []
    attach, prefill = PhaseRecorder.attach, shared_prefix.prefill

    def attached(self, *args):
        recorders.append(self)
        attach(self, *args)

    def filled(*args):
        cache = prefill(*args)
        passes.append((recorders[0].step, recorders[0].phase))
        return cache

    monkeypatch.setattr(PhaseRecorder, "attach", attached)
    monkeypatch.setattr(shared_prefix, "prefill", filled)
    plan(monkeypatch, replace(CELL, completions="sampled", lora_rank=lora_rank))
    assert command(shape_cells, "--plan", "small") == 0
    assert passes == [(1, "generate"), (2, "generate")]
    phases = [(peak.step, peak.phase) for peak in recorders[0].peaks]
    assert phases[:3] == [(0, "load"), (1, "generate"), (1, "score")] and phases.count((2, "generate")) == 1


@pytest.mark.torch
def test_a_cell_that_fails_is_a_verdict_and_wrong_kernels_are_not_used(command, tmp_path, monkeypatch):
    from experiments.builds import use_fork
    from rloo_memory.arms import ARMS

    use_fork(ARMS["shared"])
    from trl.models import prefix_sharing_contexts

    facts = dict(zip(common.FACTS, values(command, tmp_path), strict=True))
    bad = {"setting": "s", "dtype": "float32", "head_size": 128, "tensor": "output", "verdict": "too large", **facts}
    (tmp_path / "x").mkdir()
    write_csv(tmp_path / "x" / "kernels.csv", kernels.COLUMNS, [bad])

    def refuse(*args):
        raise RuntimeError("a kernel")

    monkeypatch.setattr(prefix_sharing_contexts, "shared_prefix_attention", refuse)
    plan(monkeypatch, CELL)
    assert command(shape_cells, "--plan", "small") == 0
    assert rows_of(tmp_path)[0]["attention"] == "mask"
    assert prefix_sharing_contexts.kernels_take.__name__ == "kernels_take", "put back"
    write_csv(tmp_path / "x" / "kernels.csv", kernels.COLUMNS, [{**bad, "verdict": "ok"}])
    assert command(shape_cells, "--plan", "small", "--fresh") == EXIT_VERDICT
    assert rows_of(tmp_path)[0]["status"] == "error" and "a kernel" in rows_of(tmp_path)[0]["error"]
    assert "failed: " in render("cells", tmp_path / "x")


def values(command, tmp_path):
    """Those of `FACTS` here."""
    here = common.place(common.Parser("x", "x").parse_args(["--device", "cpu", "--results", str(tmp_path)]))
    return here.facts.values()


@pytest.mark.torch
def test_the_kernels_are_judged_and_the_worst_cell_is_profiled(command, tmp_path, monkeypatch, capsys):
    assert command(kernels) == 0
    rows = rows_of(tmp_path, "kernels.csv")
    assert {row["tensor"] for row in rows} == {*kernels.TENSORS, "decoding", "log-sum-exp"}
    assert all(row["verdict"] == "ok" and float(row["error"]) < 0.02 for row in rows)
    assert "| no prompt | 4 / 2 | float32 |" in render("kernels", tmp_path / "x")
    assert command(attention_speed) == 0
    rows = rows_of(tmp_path, "attention.csv")
    assert len(rows) == 5 and all(float(row["backward_ms"]) > 0 and row["error"] == "" for row in rows)
    assert "flash_attention_for_cpu" in rows[3]["kernels"] and "prompt" in rows[2]["call"]
    plan(monkeypatch, replace(CELL, way="stock"), CELL)
    assert command(step_profile) == 0
    assert re.search(r"^stock: \d{3,} events, \d+ s .*^shared-2: \d{3,} events", capsys.readouterr().out, re.M | re.S)
    sums = [row for row in rows_of(tmp_path, "profile.csv") if row["name"] == "all"]
    assert [row["way"] for row in sums] == ["stock", "shared-2"] and all(int(row["calls"]) > 100 for row in sums)


def test_a_kernel_whose_error_is_too_large_or_that_is_not_there_is_told(command, tmp_path, monkeypatch):
    for mine, masked, verdict in (
        (3e-3, 2e-3, "ok"),
        (5e-3, 2e-3, "too large, bound 4.0e-03"),
        (float("nan"), 2e-3, "too large, bound 4.0e-03"),
        (5e-3, None, "ok"),
        (5e-2, None, "too large, bound 2.0e-02"),
    ):
        assert kernels.Compared("output", mine, masked).judged("bfloat16")["verdict"] == verdict

    def missing(*args):
        raise NotImplementedError("_flash_attention_forward()\nis not there")

    monkeypatch.setattr(kernels, "errors_of", missing)
    assert command(kernels) == EXIT_VERDICT
    assert rows_of(tmp_path, "kernels.csv")[0]["verdict"].endswith("_flash_attention_forward() is not there")
    assert "is not there" in render("kernels", tmp_path / "x")


@pytest.mark.torch
def test_masked_attention_that_fails_is_no_failure_of_the_kernels(command, tmp_path, monkeypatch):
    import torch

    def out_of_memory(*args, plain):
        if not plain:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return whole(*args, plain)

    whole = kernels.whole
    monkeypatch.setattr(kernels, "whole", out_of_memory)
    assert command(kernels) == 0
    rows = [row for row in rows_of(tmp_path, "kernels.csv") if row["tensor"] == "output"]
    assert [row["setting"] for row in rows] == [name for name in kernels.ON_CPU for _ in range(2)]
    for row in rows:
        assert row["verdict"] == "ok" and float(row["error"]) < 0.01
        assert row["masked_verdict"].startswith("OutOfMemoryError: CUDA out of memory.") and not row["masked_error"]
    assert "OutOfMemoryError: CUDA out of memory." in render("kernels", tmp_path / "x")


def test_cells_ask_about_the_kernels_that_they_use(tmp_path):
    """A device may do all that they need, and not float16 or heads of 256."""
    facts = FACTS | {"device_kind": "cuda"}
    used = {"setting": "s", "dtype": "bfloat16", "tensor": "output", "head_size": 128, "verdict": "ok", **facts}
    bad = {"verdict": "too large, bound 2.0e-03"}
    for other, right in (({"dtype": "float16"}, True), ({"head_size": 256}, True), ({"setting": "t"}, False)):
        write_csv(tmp_path / "kernels.csv", kernels.COLUMNS, [used, used | other | bad])
        assert kernels.are_right(tmp_path, facts) == right, other
    for cell in (cell for planned in PLANS.values() for cell in planned.cells):
        assert kernels.OF_CELLS[cell.device] == (cell.setup.dtype, str(cell.hf_config().head_dim)), str(cell)
    for device, settings in (("cuda", kernels.SETTINGS), ("cpu", kernels.ON_CPU)):
        assert kernels.OF_CELLS[device][1] in {str(setting.head_size) for setting in settings.values()}


def row(way, seconds, **more):
    return {**CELL.row, "way": way, "score_seconds": "0", "optimizer_seconds": "0", "train_seconds": seconds, **more}


def test_the_profile_is_of_the_shape_where_sharing_loses_most():
    rows = [row("stock", "2"), row("stock-cudnn", "1"), row("shared-2", "0.5"), row("shared-4096", "0.4")]
    other = {"prompt_tokens": "64", "k": "8", "completions": "given"}
    rows += [row("stock", "2", **other), row("shared-2", "3", **other), row("shared-all", "1.8", **other)]
    stock, shared = step_profile.worst(rows, "cpu")
    assert (stock.way, shared.way) == ("stock", "shared-all")
    assert (stock.prompt_tokens, stock.k, stock.completions, stock.device) == (64, 8, "given", "cpu")
    assert [cell.way for cell in step_profile.worst(rows[:1], "cpu")] == ["stock", "shared-2"]


def test_ways_differ_in_what_their_names_say_and_in_nothing_else():
    cell = Cell("qwen3-0.6b", 0, 3000, 100, 8, "sampled", "stock")
    setups = {way: replace(cell, way=way).setup for way in WAYS}
    base = setups["stock"]
    assert base.per_device_train_batch_size == 8 and base.dtype == "bfloat16" and not base.needs_fork
    assert setups["stock-cudnn"] == base
    assert replace(setups["stock-accumulate"].with_rows(8)) == base
    for way, tokens in (("shared-2", 2 * 101), ("shared-4096", 4096), ("shared-8192", 8192)):
        assert setups[way].tokens_per_forward == tokens
        plain = replace(setups[way], prefix_sharing=False, tokens_per_forward=None)
        assert plain == base and setups[way].prefix_sharing
    assert setups["shared-all"] == replace(base, prefix_sharing=True)
    assert setups["shared-micro-2"] == replace(base.with_rows(2), prefix_sharing=True)
    assert setups["shared-micro-2"].gradient_accumulation_steps == base.num_generations // 2
    assert setups["shared-2-mask"] == setups["shared-2"]
    assert setups["shared-2-offload"] == replace(setups["shared-2"], activation_offloading=True)
    assert replace(cell, completions="ragged").setup == replace(base, padded=True)


def test_every_planned_cell_is_one_that_the_planner_takes_and_plans_name_none_twice():
    from rloo_memory.plan.setups import check

    for name, planned in PLANS.items():
        assert len(set(planned.cells)) == len(planned.cells), name
        for cell in planned.cells:
            check(cell.setup, cell.hf_config())


def test_the_table_compares_with_the_best_of_stock_and_with_the_prediction(tmp_path):
    """Made-up figures of a GPU, to see the table; none of them leaves the temporary folder."""

    def step(way, seconds, size, predicted, **more):
        found = {f"{phase}_seconds": seconds / 4 for phase in shape_cells.PHASES}
        for phase in shape_cells.PHASES:
            sizes = {f"{phase}_{name}_bytes": int(size * 2**30) for name in ("allocated", "reserved", "device")}
            found |= sizes | {f"{phase}_predicted_bytes": int(predicted * 2**30)}
        facts = FACTS | {"device_kind": "cuda", "device_name": "A made-up GPU", "commit": "0123456789abcdef"}
        return {**CELL.row, "completions": "sampled", "status": "ok", **found, "way": way, **facts, **more}

    rows = [step("stock", 8, 40, 44), step("stock-cudnn", 4, 40, 44), step("stock-cudnn", 6, 40, 44)]
    rows += [step("shared-2", 2, 10, 9), {**step("shared-all", 2, 10, 9), "status": "oom", "error": "no room"}]
    (tmp_path / "cells").mkdir()
    write_csv(tmp_path / "cells" / "first.csv.unfinished", shape_cells.COLUMNS, rows[:3])
    write_csv(tmp_path / "cells" / "k8.csv", shape_cells.COLUMNS, rows[3:])
    text = render("cells", tmp_path)
    assert text.startswith("*GPU: A made-up GPU · torch x · commit 0123456789*")
    assert (
        "| `stock-cudnn` | 1.250 | 1.250 | 1.250 | 1.250 | 5.000 | 40.00 | 40.00 | 40.00 | 44.00 (+10.0 %) |" in text
    )
    times = "2.000 (2.5 x) | 10.00 (4.0 x) | 10.00 | 10.00 | 9.00 (\N{MINUS SIGN}10.0 %) |"
    assert (
        f"| `shared-2` | 0.500 | 0.500 | 0.500 | 0.500 | {times}" in text and "`shared-all` | out of memory |" in text
    )
    with pytest.raises(LoadError, match="no cells; run python -m experiments.evidence.on_gpu"):
        render("cells", tmp_path / "cells")


def test_given_completions_are_the_same_for_every_way_and_ragged_ones_differ_in_length():
    class Trainer:
        _generate_single_turn = None

    class Tokenizer:
        eos_token_id = 3

        def __len__(self):
            return 500

    cell = replace(CELL, k=8, completion_tokens=100)
    stock, shared = (
        shape_cells.Completions(Trainer(), replace(cell, way=way), Tokenizer(), None) for way in ("stock", "shared-2")
    )
    ids = stock.given()
    assert ids == shared.given()
    assert sorted({len(x) for x in ids})[0] == 25 and max(map(len, ids)) == 100 and len({len(x) for x in ids}) == 8
    assert all(x[-1] == 3 and 3 not in x[:-1] for x in ids)
    equal = shape_cells.Completions(Trainer(), replace(cell, completions="given"), Tokenizer(), None).given()
    assert {len(x) for x in equal} == {100}


@pytest.mark.torch
def test_what_a_gpu_loads_during_the_training_is_counted_outside_of_the_pool(tmp_path, monkeypatch):
    """On a made-up GPU of 10,000 bytes: 100 beside the pool before the training, 130 after it."""
    import torch

    gpu = {"pool": 1000, "beside": 100}
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: gpu["pool"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000 - sum(gpu.values()), 10_000))
    model = torch.nn.Linear(1, 1)
    model.generate = None

    def train():
        for _ in range(2):
            trainer._generate_single_turn(None)
            model(torch.ones(1, 1)).sum().backward()
            trainer.optimizer.step()
        gpu["beside"] = 130

    trainer = SimpleNamespace(model=model, train=train, _generate_single_turn=None, remove_callback=lambda kind: None)
    trainer.optimizer = torch.optim.SGD(model.parameters())
    cell = replace(CELL, completions="given", device="cuda")
    (row,) = shape_cells.measure_steps(trainer, cell, range(20), tmp_path, steps=1)
    assert [row[f"train_{size}_bytes"] for size in ("reserved", "device")] == [1000, 1130]


@pytest.mark.parametrize("way, lengths", (("stock", [8, 100]), ("stock-cudnn", [100, 100]), ("shared-2", [8, 100])))
def test_cudnn_has_seen_all_lengths_before_a_step_is_measured(way, lengths):
    """It plans each length of the keys when it first comes up."""
    settings, asked = SimpleNamespace(), []

    def sample(ids):
        asked.append((settings.min_new_tokens, settings.max_new_tokens))

    trainer = SimpleNamespace(_generate_single_turn=sample, generation_config=settings)
    cell = replace(CELL, completions="sampled", completion_tokens=100, way=way)
    completions = shape_cells.Completions(trainer, cell, range(20), None)
    for _ in lengths:
        completions.generate([])
    assert asked == [(length, length) for length in lengths]


def test_predictions_are_made_once_and_read_where_they_are(tmp_path, monkeypatch):
    from rloo_memory.plan import predict

    calls = []

    class Peak:
        phase, total = "train", 5

    class Prediction:
        phases = [Peak]

    monkeypatch.setattr(predict, "predict", lambda *args: calls.append(args[0]) or Prediction)
    cells = [CELL, replace(CELL, way="shared-2-mask"), replace(CELL, way="stock-cudnn")]
    for _ in range(2):
        expected_peaks.predict_cells(cells, tmp_path / "p.json", say=lambda text: None)
    assert calls == ["shared-2-mask", "stock-cudnn"], "with a mask as without, with cuDNN as without"
    assert expected_peaks.read_peaks(tmp_path / "p.json")[CELL.key] == {"train": 5}
    assert expected_peaks.read_peaks(tmp_path / "gone.json") == expected_peaks.read_peaks(None) == {}


@pytest.mark.parametrize(
    "module, options",
    [
        (sampler_check, ["--scale", "test", "--k", "2", "--threads", "1"]),
        (planner_check, ["--cases", "shared-k8,stock-k8"]),
    ],
)
def test_measurements_begin_nothing_after_their_minutes(command, capsys, module, options):
    assert command(module, *options, "--minutes", "0") == EXIT_TIME
    assert "not begun after --minutes 0" in capsys.readouterr().out


def test_an_unknown_plan_is_one_line(command, capsys):
    assert command(shape_cells, "--plan", "smal") == 2
    assert capsys.readouterr().err.startswith("shape_cells: unknown plan 'smal'; choose one of: first")
    with pytest.raises(ConfigError):
        common.place(common.Parser("x", "x").parse_args(["--device", "cpu", "--machine", "../x"]))
