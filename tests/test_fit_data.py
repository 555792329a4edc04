"""docs/fit.json: sums that say what the planner says, and a long making of them that can be interrupted."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.config import ROOT
from experiments.fitting import fit_check, fit_data
from experiments.record import read_csv
from rloo_memory.errors import ConfigError

SLOW = pytest.mark.slow


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind, arm, cards, apart",
    [
        ("full", "stock", 1, 1e-5),
        pytest.param("full", "stock-accumulate", 1, 1e-5, marks=SLOW),
        pytest.param("full", "shared", 2, 1e-5, marks=SLOW),
        pytest.param("alternating", "stock", 1, 1e-5, marks=SLOW),
        pytest.param("alternating", "shared", 1, 5e-3, marks=SLOW),
    ],
)
def test_curves_say_what_simulating_all_passes_says_elsewhere(kind, arm, cards, apart, forked):
    """Two layers, where no weights hide an error; lengths and k far from those that were simulated."""
    result = forked("fit_curves", kind, arm, cards)
    assert result.returncode == 0, result.stderr[-3000:]
    constants, *rows = map(json.loads, result.stdout.splitlines())
    from experiments.fitting.fit_terms import FIRST_ROOM, LM_HEAD_TILE

    assert constants == {"tile": LM_HEAD_TILE, "room": FIRST_ROOM}
    assert len(rows) == 6 * 5
    for row in rows:
        assert row["page"] == pytest.approx(row["simulated"], rel=apart), row


@pytest.mark.torch
def test_an_allocation_that_only_some_visits_have_does_not_count():
    """Where visits differ, the same name is another allocation."""
    from rloo_memory.plan.scale_up.extrapolate import highest

    names = {0: ("add 0",), 1: ("add 0", "mul 0"), 2: ("mul 0",), 3: ("add 0", "mul 0"), 4: (), 5: ("add 0",)}
    stretches = {("train", "backward", 0, visit): {"activations": 10 + visit} for visit in names}
    for visit, found in names.items():
        stretches |= {("train", f"backward: {name}", 0, visit): {"activations": 1 + visit} for name in found}
    assert {place[1:]: kinds["activations"] for place, kinds in highest(stretches).items()} == {
        ("backward", 0, "first"): 10,
        ("backward: add 0", 0, "first"): 1,
        ("backward", 0, "early"): 11,
        ("backward: add 0", 0, "early"): 2,
        ("backward: mul 0", 0, "early"): 2,
        ("backward", 0, "between"): 13,
        ("backward: mul 0", 0, "between"): 4,  # of both; "add 0" only one has
        ("backward", 0, "late"): 14,
        ("backward", 0, "last"): 15,
        ("backward: add 0", 0, "last"): 6,
    }


@pytest.mark.torch
def test_allocations_are_the_same_where_more_layers_shift_their_numbers():
    from rloo_memory.plan.scale_up.extrapolate import same_allocations

    few = ["b: begins", "b: mm 0", "b: to 0", "b: to 1", "b: mm 1", "b: to 2", "b"]
    more = ["b: begins", "b: mm 0", "b: to 0", "b: to 1", "b: to 2", "b: mm 1", "b: to 3", "b"]
    # Which one of "to" is new is not said, so none of that row counts
    pairs = [("b: begins", "b: begins"), ("b: mm 0", "b: mm 0"), ("b: mm 1", "b: mm 1"), ("b: to 2", "b: to 3")]
    assert same_allocations(few, more) == [*pairs, ("b", "b")]
    assert same_allocations(more, few) == [*((few, more) for more, few in pairs), ("b", "b")]
    assert same_allocations(few, few) == [(name, name) for name in few]
    assert same_allocations(few, ["b: begins", "b: cat 0", "b"]) == [("b", "b")], "another stretch"


@pytest.mark.torch
def test_a_stretch_that_is_no_sum_is_an_error():
    """Peaks between events without an allocation behind them: what is not linear in C has no sum to be fitted."""
    from experiments.fitting import fit_curves
    from rloo_memory.plan.simulation.simulate import PHASES

    def stretches(completion: int) -> dict:
        places = {(phase, "start", None, "early"): {"parameters": 10**9} for phase in PHASES}
        return places | {("train", "start", None, "early"): {"activations": max(10**6, 1000 * completion)}}

    lengths = fit_curves.simulated_lengths("stock", None)
    curves = fit_curves.fitted("stock", None, {each: stretches(1000 + each[1]) for each in lengths})
    assert curves.error < 1e-6
    curves = fit_curves.fitted("stock", None, {each: stretches(each[1]) for each in lengths})
    assert curves.error > 0.02


def test_one_card_shares_in_micro_batches_of_two_and_several_in_passes_of_two():
    from experiments.fitting.fit_curves import setup_at

    all_weights = fit_data.TRAINED["all"][1]
    one, several = (setup_at(fit_data.on_cards(all_weights, n), "shared", (100, 64, 8)) for n in (1, 2))
    assert (one.per_device_train_batch_size, one.gradient_accumulation_steps, one.steps_per_generation) == (2, 4, 4)
    assert (several.per_device_train_batch_size, several.tokens_per_forward) == (8, 2 * 65)
    assert one.dtype == "float32" and one.bf16 and not several.rounds_updates_away


@pytest.mark.torch
def test_interrupted_it_keeps_its_parts_and_goes_on(tmp_path, forked):
    command = [sys.executable, "-m", "tests.probes.fit_interrupted", str(tmp_path), "--processes", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = [process.stdout.readline() for _ in range(3)]
    assert said[0] == "0 of 13 parts are there\n"
    assert said[2].startswith("2 of 13: Qwen/Qwen3-0.6B, all weights, float32, ")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - start < 20
    assert "of 13 parts; the same command goes on" in error and "Traceback" not in error
    assert not (tmp_path / "fit.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("*.json")}
    assert 2 <= len(kept) < 13

    result = forked("fit_interrupted", tmp_path, "--processes", 2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith(f"{len(kept)} of 13 parts are there; remove ")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    data = json.loads((tmp_path / "fit.json").read_text())
    assert "code" not in data and data["models"][0]["name"] == "Qwen/Qwen3-0.6B"
    assert {name: [*arms] for name, arms in data["models"][0]["several"].items()} == {
        "all": ["stock", "stock-accumulate", "shared"],
        "lora": ["shared"],
    }
    gathered = data["models"][0]["gathered"]  # of what is trained on several cards, by phase
    assert gathered.keys() == {"all", "lora"} and gathered["all"]["train"].keys() == {"parameters", "gradients"}
    assert not gathered["lora"]["load"] and gathered["lora"]["train"].keys() == {"parameters"}
    again = forked("fit_interrupted", tmp_path)
    assert again.returncode == 0 and again.stdout.startswith("13 of 13 parts are there; remove ")
    before = data | {"code": "gone", "reserve_bytes": 1}
    before["models"] = [{name: model[name] for name in ("name", "trained", "several")} for model in data["models"]]
    (tmp_path / "fit.json").write_text(json.dumps(before))
    facts = forked("fit_interrupted", tmp_path, "--facts")
    assert facts.returncode == 0, facts.stderr[-3000:]
    assert json.loads((tmp_path / "fit.json").read_text()) == data, "all but the sums is made anew"


def ends_itself_at_2(task: int) -> int:
    if task == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


@pytest.mark.torch
def test_a_process_that_the_system_ends_is_an_error_not_a_wait(shared_fork):
    """It imports trl, and other tests in this process want the fork's."""
    results = fit_data.in_processes(ends_itself_at_2, [1, 2, 3], 2)
    with pytest.raises(ConfigError, match="the system ended one of 2 processes"):
        list(results)


WRONG = {
    "--models 'qwen9' is not on the page; it has qwen3-0.6b": ["--models", "qwen3-8b,qwen9"],
    "--processes is 0; it must be at least 1": ["--processes", "0"],
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_option_is_told_in_one_line(words, capsys):
    assert fit_data.main(WRONG[words]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def committed() -> tuple[dict, list[dict]]:
    return json.loads(fit_data.PAGE.read_text()), read_csv(fit_check.TABLE)


def test_at_random_choices_the_page_is_within_2_percent_of_the_planner():
    data, rows = committed()
    drawn = [tuple(str(choice[name]) for name in fit_check.CHOICE) for choice in fit_check.choices(data, 200)]
    there = [tuple(row[name] for name in fit_check.CHOICE) for row in rows]
    assert there == [choice for choice in drawn if choice in there] and len(rows) == data["compared"]["choices"] > 50
    few = fit_check.few(fit_check.choices(data, 200))
    assert {tuple(str(choice[name]) for name in fit_check.CHOICE) for choice in few} <= set(there)
    assert {row["model"] for row in rows} == {model["name"] for model in data["models"]} == set(fit_data.MODELS)
    assert fit_check.compared(rows) == data["compared"] and data["compared"]["apart"] < fit_check.MOST_APART


def test_24_choices_have_every_model_what_is_trained_and_arm():
    data = {"models": [{"name": name, "positions": 10**6} for name in fit_data.MODELS], "trained": fit_data.TRAINED}
    data |= {"least": {"prompt": 64, "completion": 64, "k": 4}, "most": {"prompt": 9000, "completion": 9000, "k": 128}}
    found = fit_check.few(fit_check.choices(data, fit_check.CHOICES))
    assert len(found) == fit_check.STALE and {each["model"] for each in found} == set(fit_data.MODELS)
    kinds = {(each["trained"], each["arm"], each["cards"] > 1) for each in found}
    assert len(kinds) == 3 * (2 * len(fit_data.TRAINED) - len(fit_data.ON_ONE_CARD))


@pytest.mark.torch
def test_a_planner_that_says_something_else_makes_the_page_stale(monkeypatch, capsys):
    planned = dict.fromkeys(fit_check.PHASES, 10**9)
    monkeypatch.setattr(fit_check, "planned_peaks", lambda choice: planned)
    for page, code in ((1.019e9, 0), (1.021e9, 2)):
        monkeypatch.setattr(fit_check, "page_peaks", lambda data, choice, page=page: planned | {"train": page})
        assert fit_check.main(["--stale", "--processes", "1"]) == code
        said = capsys.readouterr()
        assert "24 choices: " in said.out and ("the page is stale; run make fit-data" in said.err) == (code == 2)


@pytest.mark.torch
@SLOW
def test_the_planner_of_this_tree_still_says_what_the_page_says():
    command = [sys.executable, "-m", "experiments.fitting.fit_check", "--stale", "--processes", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "24 choices: " in result.stdout
