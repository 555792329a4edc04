"""Cells of real shapes at small size: every way to train, a way that runs out of memory, and their table."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.bench import on_gpu, trainings
from experiments.bench.measurements import MEASUREMENTS
from experiments.bench.samples import COLUMNS, Cell, read_table
from experiments.bench.trainings import Completions, Trained, setup_of
from experiments.checks import kernels
from experiments.measuring import FACTS, Place
from experiments.record import write_csv
from rloo_memory.phases import PhaseRecorder
from visualization.files import LoadError
from visualization.tables import render

CELL = Cell("tiny-qwen3/sampled", 48, 8, 4)
PLANNED = {name: planned for name, planned in MEASUREMENTS.items() if name.startswith("cells-")}


@pytest.fixture
def trained(tmp_path, shared_fork):
    """Makes what trains a cell."""

    def make(cell=CELL, ways=("stock",), device="cpu"):
        return Trained(cell, ways, Place(device, tmp_path, dict.fromkeys(FACTS, "x") | {"device_kind": "cpu"}))

    return make


@pytest.mark.torch
def test_every_phase_is_measured_and_nothing_of_a_trainer_stays(trained, monkeypatch):
    import torch
    from transformers import PreTrainedModel

    subject, alive, given = trained(), [], Completions.given

    def or_out_of_memory(self):
        """As it is raised, in the middle of a training."""
        alive.append(sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects()))
        if self.way == "stock-accumulate":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB\nmore")
        return given(self)

    monkeypatch.setattr(Completions, "given", or_out_of_memory)
    for way in ("stock", "shared-micro-2"):
        values = subject.sample(way)
        assert all(values[f"{phase}_seconds"] > 0 for phase in trainings.PHASES)
        assert all(values[f"{phase}_resident_bytes"] > 2**20 for phase in trainings.PHASES)
        assert values["step_seconds"] == pytest.approx(sum(values[f"{phase}_seconds"] for phase in trainings.PHASES))
        assert "train_allocated_bytes" not in values, "a CPU has no such counter"
        if way == "stock":
            with pytest.raises(torch.OutOfMemoryError):
                subject.sample("stock-accumulate")
    assert alive[1] == alive[2], "nothing of a trainer stays for the next one"


@pytest.mark.torch
@pytest.mark.parametrize("model", ("tiny-qwen3/sampled", "tiny-qwen3-lora/sampled"))
def test_the_prompt_is_computed_within_generation(trained, monkeypatch, model):
    """Once a rollout, with LoRA through the base model alone."""
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
    monkeypatch.setattr(trainings, "STEPS", 1)
    trained(replace(CELL, model=model)).sample("shared-2")
    assert passes == [(1, "generate"), (2, "generate")]
    phases = [(peak.step, peak.phase) for peak in recorders[0].peaks]
    assert phases[:3] == [(0, "load"), (1, "generate"), (1, "score")] and phases.count((2, "generate")) == 1


@pytest.mark.torch
def test_wrong_kernels_are_not_used(trained, tmp_path, monkeypatch):
    from trl.models import prefix_sharing_contexts

    facts = dict.fromkeys(FACTS, "x") | {"device_kind": "cpu"}
    bad = {"setting": "s", "dtype": "float32", "head_size": 128, "tensor": "output", "verdict": "too large", **facts}

    def refuse(*args):
        raise RuntimeError("a kernel")

    monkeypatch.setattr(prefix_sharing_contexts, "shared_prefix_attention", refuse)
    cell = replace(CELL, model="tiny-qwen3/ragged")
    write_csv(tmp_path / "kernels.csv", kernels.COLUMNS, [bad])
    assert "generate_seconds" not in trained(cell).sample("shared-2"), "completions are given"
    assert prefix_sharing_contexts.kernels_take.__name__ == "kernels_take", "put back"
    write_csv(tmp_path / "kernels.csv", kernels.COLUMNS, [{**bad, "verdict": "ok"}])
    with pytest.raises(ValueError, match="RuntimeError: a kernel"):
        trained(cell).sample("shared-2")


def test_cells_ask_about_the_kernels_that_they_use(tmp_path):
    """A device may do all that they need, and not float16 or heads of 256."""
    facts = dict.fromkeys(FACTS, "x") | {"device_kind": "cuda"}
    used = {"setting": "s", "dtype": "bfloat16", "tensor": "output", "head_size": 128, "verdict": "ok", **facts}
    bad = {"verdict": "too large, bound 2.0e-03"}
    for other, right in (({"dtype": "float16"}, True), ({"head_size": 256}, True), ({"setting": "t"}, False)):
        write_csv(tmp_path / "kernels.csv", kernels.COLUMNS, [used, used | other | bad])
        assert kernels.are_right(tmp_path, facts) == right, other
    for device, settings in (("cuda", kernels.SETTINGS), ("cpu", kernels.ON_CPU)):
        assert kernels.OF_CELLS[device][1] in {str(setting.head_size) for setting in settings.values()}


def test_every_planned_cell_is_one_that_the_planner_takes_and_lists_name_none_twice():
    from rloo_memory.plan.setups import check

    for name, planned in PLANNED.items():
        assert len(set(planned.cells)) == len(planned.cells), name
        assert {cell.model for cell in planned.cells} <= set(planned.models)
        device = planned.device or "cpu"
        for cell in planned.cells:
            config = trainings.config_of(cell, device)
            for way in planned.ways:
                setup = setup_of(cell, way, device)
                check(setup, config)
                assert kernels.OF_CELLS[device] == (setup.dtype, str(config.head_dim)), (name, cell, way)


def test_ways_differ_in_what_their_names_say_and_in_nothing_else():
    cell = Cell("qwen3-0.6b/sampled", 3000, 100, 8)
    setups = {way: setup_of(cell, way, "cuda") for way in trainings.WAYS}
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
    assert setup_of(replace(cell, model="qwen3-0.6b/ragged"), "stock", "cuda") == replace(base, padded=True)
    assert setup_of(replace(cell, model="qwen3-8b-lora/given"), "stock", "cuda") == replace(base, lora_rank=16)


class Tokenizer:
    eos_token_id = 3

    def __len__(self):
        return 500


def test_given_completions_are_the_same_for_every_way_and_ragged_ones_differ_in_length():
    trainer, cell = SimpleNamespace(_generate_single_turn=None), Cell("tiny-qwen3/ragged", 48, 100, 8)
    stock, shared = (Completions(trainer, cell, way, Tokenizer(), None).given() for way in ("stock", "shared-2"))
    assert stock == shared
    assert min(map(len, stock)) == 25 and max(map(len, stock)) == 100 and len({len(x) for x in stock}) == 8
    assert all(x[-1] == 3 and 3 not in x[:-1] for x in stock)
    equal = Completions(trainer, replace(cell, model="tiny-qwen3/given"), "stock", Tokenizer(), None).given()
    assert {len(x) for x in equal} == {100}


@pytest.mark.parametrize("way, lengths", (("stock", [8, 100]), ("stock-cudnn", [100, 100]), ("shared-2", [8, 100])))
def test_cudnn_has_seen_all_lengths_before_a_step_is_measured(way, lengths):
    """It plans each length of the keys when it first comes up."""
    settings, asked = SimpleNamespace(), []

    def sample(ids):
        asked.append((settings.min_new_tokens, settings.max_new_tokens))

    trainer = SimpleNamespace(_generate_single_turn=sample, generation_config=settings)
    completions = Completions(trainer, Cell("tiny-qwen3/sampled", 48, 100, 4), way, range(20), None)
    for _ in lengths:
        completions.generate([])
    assert asked == [(length, length) for length in lengths]


@pytest.mark.torch
def test_what_a_gpu_loads_during_the_training_is_counted_outside_of_the_pool(trained, monkeypatch):
    """On a made-up GPU of 10,000 bytes: 100 beside the pool before the training, 130 after it."""
    import torch
    from transformers import PrinterCallback

    gpu = {"pool": 1000, "beside": 100}
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: gpu["pool"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000 - sum(gpu.values()), 10_000))
    model = torch.nn.Linear(1, 1)
    model.generate = None

    def train():
        for _ in range(3):
            trainer._generate_single_turn(None)
            model(torch.ones(1, 1)).sum().backward()
            trainer.optimizer.step()
        gpu["beside"] = 130

    trainer = SimpleNamespace(model=model, train=train, _generate_single_turn=None)
    trainer.remove_callback = lambda kind: kind is PrinterCallback
    trainer.optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(trainings, "build_trainer", lambda *args: trainer)
    subject = trained(replace(CELL, model="tiny-qwen3/given"))
    subject.device = "cuda"
    values = subject.sample("stock")
    assert [values[f"train_{size}_bytes"] for size in ("reserved", "device")] == [1000, 1130]


def rows_of(way, seconds, size, predicted=None, failure="", **more):
    """Made-up figures of a GPU, to see the table; none of them leaves the temporary folder."""
    facts = dict.fromkeys(FACTS, "x") | {
        "device_kind": "cuda",
        "device_name": "A made-up GPU",
        "commit": "0123456789ab",
    }
    about = {"measurement": "cells-first", "model": "qwen3-8b-lora/sampled", "prompt_tokens": 3000, "k": 8, "way": way}
    about |= {"completion_tokens": 100, "repeats": 2, "failure": failure, **facts, **more}
    if failure:
        return [about]
    metrics = {"step_seconds": seconds} | {f"{phase}_seconds": seconds / 4 for phase in trainings.PHASES}
    for phase in trainings.PHASES:
        metrics |= {f"{phase}_{name}_bytes": size * 2**30 for name in ("allocated", "reserved", "device")}
        metrics |= {f"{phase}_predicted_bytes": predicted * 2**30} if predicted else {}
    return [about | {"metric": name, "median": x, "low": x, "high": x} for name, x in metrics.items()]


def test_the_table_compares_with_the_best_of_stock_and_with_the_prediction(tmp_path):
    rows = rows_of("stock", 8, 40, 44) + rows_of("stock-cudnn", 5, 40, 44) + rows_of("shared-2", 2, 10, 9)
    rows += rows_of("shared-all", 2, 10, failure="out of memory: no room")
    write_csv(tmp_path / "bench.csv", COLUMNS, rows)
    text = render("cells", tmp_path)
    assert text.startswith("*GPU: A made-up GPU · torch x · transformers x · commit 0123456789*")
    assert "qwen3-8b-lora, P = 3,000, C = 100, k = 8, completions sampled:" in text
    sizes = "5.000 | 40.00 | 40.00 | 40.00 | 44.00 (+10.0 %) |"
    assert f"| `stock-cudnn` | 1.250 | 1.250 | 1.250 | 1.250 | {sizes}" in text
    times = "2.000 (2.500 x) | 10.00 (4.0 x) | 10.00 | 10.00 | 9.00 (\N{MINUS SIGN}10.0 %) |"
    assert f"| `shared-2` | 0.500 | 0.500 | 0.500 | 0.500 | {times}" in text
    assert "`shared-all` | out of memory: no room |" in text
    write_csv(tmp_path / "bench.csv", COLUMNS, [])
    with pytest.raises(LoadError, match="has nothing of cells-; run python -m experiments.bench"):
        render("cells", tmp_path)


def test_predictions_are_put_beside_what_was_measured(tmp_path, monkeypatch):
    from rloo_memory.plan import predict

    asked = []

    def predicted(name, setup, config):
        asked.append(name)
        return SimpleNamespace(phases=[SimpleNamespace(phase="train", total=5)])

    monkeypatch.setattr(predict, "predict", predicted)
    ways = ("shared-2", "shared-2-mask", "stock-cudnn")
    write_csv(tmp_path / "bench.csv", COLUMNS, [row for way in ways for row in rows_of(way, 2, 10)])
    for _ in range(2):
        asked.clear()
        on_gpu.predict(tmp_path)
        assert asked == ["shared-2", "stock-cudnn"], "with a mask as without"
    found = [row for row in read_table(tmp_path) if row["metric"] == "train_predicted_bytes"]
    assert [(row["way"], row["median"], row["unit"]) for row in found] == [(way, "5", "bytes") for way in ways]
