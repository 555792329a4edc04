"""docs/fit.html: its numbers are the planner's, and its settings are what planner, launcher and TRL take."""

import ast
import copy
import inspect
import shlex
import subprocess
from dataclasses import asdict, replace
from functools import partial

import fit_page
import pytest
from fit_page import ARMS, CHOICE, DATA, MEASURED, MODEL, MODELS, TRAINED, address, choices

from experiments.config import ROOT
from experiments.fitting import fit_check
from experiments.fitting.fit_data import on_cards
from experiments.record import read_csv
from rloo_memory.sizes import GIB
from visualization.fit import make_page

browser, file, opened = fit_page.browser, fit_page.file, fit_page.opened  # fixtures


def test_peaks_are_the_sums_that_the_planner_fitted_with_what_sharding_and_the_allocator_add(opened):
    from experiments.fitting.fit_terms import value
    from rloo_memory.plan.accuracy.reserve import FIXED, Room
    from rloo_memory.plan.peaks import PredictedPeak
    from rloo_memory.plan.scale_up.sharding import SHARDED, widened

    asked = choices(200, seed=3)
    ask = "asked => asked.map((choice) => ['peaks', 'needed'].map((name) => window.fit[name](choice.model, choice)))"
    for choice, (answer, needed) in zip(asked, opened().evaluate(ask, asked), strict=True):
        model, lengths = MODELS[choice["model"]], (choice["prompt"], choice["completion"], choice["k"])
        cards = choice["cards"]
        setup = on_cards(TRAINED[choice["trained"]], cards)
        for arm, phases in model["trained"][choice["trained"]].items():
            peaks = []
            if cards > 1:
                phases = model["several"][choice["trained"]].get(arm, phases)
            for phase, regimes in phases.items():
                sharded = (*SHARDED, *(("activations",) if phase == "optimizer" else ())) if cards > 1 else ()
                of = partial(value, window=model["window"], lengths=lengths)
                each = []
                for kinds in [kinds for regime in regimes if of(regime["when"]) for kinds in regime["stretches"]]:
                    sizes = {kind: sum(size * of(term) for term, size in by.items()) for kind, by in kinds.items()}
                    if not choice["reference"]:
                        sizes.pop("reference", None)
                    for kind in sizes.keys() & sharded:
                        sizes[kind] *= widened(setup, kind) / cards
                    each.append({kind: size for kind, size in sizes.items() if kind != "host"})
                gathered = model["gathered"][choice["trained"]][phase] if cards > 1 else {}
                most = max(each, key=lambda kinds: sum(kinds.values()))
                most |= {kind: most.get(kind, 0) + size for kind, size in gathered.items()}
                total = sum(most.values())
                assert answer[arm][phase] == pytest.approx(total, rel=1e-8), (choice, arm, phase)
                peaks.append(PredictedPeak(phase, total, most, 0))
            assert needed[arm] == pytest.approx(Room(0, FIXED).needed(peaks), rel=1e-8), (choice, arm)


def test_at_the_recorded_choices_the_browser_says_what_was_compared_with_the_planner(opened):
    """results/plans/fit_check.csv has both at random choices."""
    rows = read_csv(fit_check.TABLE)
    asked = [dict(model=row["model"], trained=row["trained"], **lengths_of(row)) for row in rows]
    answers = opened().evaluate("asked => asked.map((choice) => window.fit.peaks(choice.model, choice))", asked)
    assert len(rows) == DATA["compared"]["choices"]
    for row, answer in zip(rows, answers, strict=True):
        for phase, size in answer[row["arm"]].items():
            assert size == pytest.approx(int(row[f"{phase}_page_bytes"]), rel=1e-6), (row, phase)


def lengths_of(row: dict) -> dict:
    columns = {"prompt": "prompt_tokens", "completion": "completion_tokens", "k": "k", "cards": "cards"}
    return {name: int(row[column]) for name, column in columns.items()} | {"reference": row["reference"] == "1"}


def by_hand(weights: float) -> dict:
    """Formulas of an arm that can be followed; a second tile of the LM head takes less."""
    alive = {"parameters": {"1": weights}, "reference": {"1": weights}, "optimizer state": {"1": 2 * weights}}
    alive |= {"host": {"1": 9e15}}
    activations = {"k*P": 4e5, "k*C": 4e5, "k*P*P": 2.0, "k*C*C": 2.0}
    train = {**alive, "activations": activations, "gradients": {"1": 0.25 * weights}}
    tiles = {"(k*C<=4096)": 0, "(k*C>4096)": -9e8}
    passes = {when: {**train, "logits": {"min(k*C,4096)": 6e5, "1": size}} for when, size in tiles.items()}
    ended = {"when": "1", "stretches": [{**alive, "gradients": {"1": weights}}]}
    return {
        "load": [{"when": "1", "stretches": [{"parameters": {"1": weights}}]}],
        "score": [{"when": "1", "stretches": [{**alive, "activations": {"P": 3e5}}]}],
        "train": [*({"when": when, "stretches": [held]} for when, held in passes.items()), ended],
        "optimizer": [ended],
    }


def test_a_peak_by_hand(opened, tmp_path):
    """8 completions of 512 are one tile of the LM head; those of 1,024 are two, and the second counts."""
    weights = 2 * 8_190_735_360
    data = copy.deepcopy(DATA)
    model = next(model for model in data["models"] if model["name"] == MODEL)
    model["trained"]["all"]["stock"], model["several"]["all"]["stock"] = by_hand(weights), by_hand(0.75 * weights)
    (tmp_path / "fit.html").write_text(make_page.page(data, asdict(MEASURED)))
    page = opened(path=tmp_path / "fit.html")
    ask = f"choice => window.fit.peaks('{MODEL}', choice)"
    choice = dict(trained="all", prompt=1000, completion=512, k=8, cards=1, reference=True)
    alive = 4 * weights  # with the reference, and an optimizer state of two
    peaks = page.evaluate(ask, choice)
    assert peaks["stock"]["load"] == weights
    assert peaks["stock"]["optimizer"] == 5 * weights
    activations = 8 * 1512 * 4e5 + 8 * (1000**2 + 512**2) * 2
    train = alive + weights / 4 + activations + 4096 * 6e5
    assert peaks["stock"]["train"] == pytest.approx(max(train, 5 * weights))
    peaks = page.evaluate(ask, choice | {"completion": 1024})
    activations = 8 * 2024 * 4e5 + 8 * (1000**2 + 1024**2) * 2
    assert peaks["stock"]["train"] == pytest.approx(
        max(alive + weights / 4 + activations + 4096 * 6e5 - 9e8, 5 * weights)
    )
    assert page.evaluate(ask, choice | {"reference": False})["stock"]["optimizer"] == 4 * weights
    on_cards = page.evaluate(ask, choice | {"cards": 4})["stock"]["optimizer"]
    assert on_cards == 0.75 * 9 * weights / 4, "float32 but the reference, and sums of their own"
    gathered = model["gathered"]["all"]["score"]["parameters"]
    score = page.evaluate(ask, choice | {"cards": 4})["stock"]["score"]
    assert score == pytest.approx(0.75 * 7 * weights / 4 + gathered + 1000 * 3e5)


def test_the_largest_fits_and_one_step_more_does_not(opened):
    check = """([asked, arms, least]) => asked.map((choice) => [choice, Object.fromEntries(arms.flatMap((arm) =>
      ["k", "prompt", "completion"].map((name) => {
        const needed = (value) => window.fit.needed(choice.model, {...choice, [name]: value})[arm];
        const value = window.fit.largest(choice.model, choice, arm, name);
        const [fits, step] = [value || least[name], name === "k" ? 2 : 1];
        return [`${arm} ${name}`, [value, needed(fits), needed(fits + step)]];
      })))])"""
    ends = 0
    for choice, found in opened().evaluate(check, [choices(40, seed=4), ARMS, DATA["least"]]):
        may = choice["card"] * GIB - DATA["reserve_bytes"]
        for what, (value, peak, more) in found.items():
            name = what.split()[1]
            least, most, step = DATA["least"][name], DATA["most"][name], 2 if name == "k" else 1
            if name != "k":
                other = choice["completion" if name == "prompt" else "prompt"]
                most = min(most, MODELS[choice["model"]]["positions"] - other)
            if not value:
                assert peak > may, (choice, what)
                continue
            assert least <= value <= most and peak <= may, (choice, what)
            assert value + step > most or more > may, (choice, what)
            ends += value + step <= most
    assert ends > 50, "most of the largest are where memory ends"


def test_what_is_shown_is_what_is_computed_with_its_error(opened):
    page = opened(address())
    peaks = page.evaluate("choice => window.fit.peaks(choice.model, choice)", CHOICE)
    may = int(CHOICE["card"] * GIB) - DATA["reserve_bytes"]
    needed = page.evaluate("choice => window.fit.needed(choice.model, choice)", CHOICE)
    for row, arm in zip(page.query_selector_all("#answer tbody tr"), ARMS, strict=True):
        phase, peak = max(peaks[arm].items(), key=lambda item: item[1])
        text = row.inner_text().replace("\xa0", " ")
        assert f"{peak / GIB:.2f} GiB in {phase}" in text
        assert f"stands for {peak * MEASURED.low / GIB:.2f} to {peak * MEASURED.high / GIB:.2f} GiB" in text
        spare = f"fits: {(may - peak) / GIB:.2f} GiB to spare" if peak <= may else "does not fit: short by"
        assert spare in text and (needed[arm] <= may or "✓" not in text)
        assert ("just fits" in text) == (peak <= may < max(needed[arm], peak * MEASURED.high))
    page.click("summary")
    page.wait_for_selector("#numbers table")
    cells = page.evaluate(
        """[...document.querySelectorAll("#numbers tbody tr")].map((row) =>
          [...row.cells].map((cell) => parseFloat(cell.textContent)))"""
    )
    assert len(cells) == 15
    for _, *kinds, total in cells:
        assert sum(kinds) == pytest.approx(total, abs=0.05), "the kinds of a phase add up"
    bars = page.evaluate(
        """[...document.querySelectorAll(".bar")].map((bar) => [bar.getAttribute("aria-label"),
          [...bar.querySelectorAll(".part")].length, bar.closest(".phase").querySelector(".size").textContent])"""
    )
    assert len(bars) == 15 and all(len(label.split(",")) == parts > 0 for label, parts, _ in bars)
    said = page.inner_text("body")
    assert ("Not compared with a GPU yet" in said) == ("GPU" not in MEASURED.devices)
    assert "All k completions go through" in said


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_its_settings_are_what_launcher_planner_and_trl_take(opened, tmp_path, monkeypatch):
    from rloo_memory.plan import __main__ as plan
    from rloo_memory.plan.accuracy.reserve import Room
    from rloo_memory.plan.levers import planned
    from rloo_memory.plan.options import room_of, setup_from
    from rloo_memory.settings.profiles import load_profile

    page = opened()
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".build").mkdir()
    (tmp_path / "rloo_memory").symlink_to(ROOT / "rloo_memory")
    asked = (("all", 1, 2, 8), ("all", 1, 1, 6), ("lora", 1, 1, 8), ("lora", 0, 8, 16), ("lora-4-bits", 1, 1, 4))
    for trained, reference, cards, k in asked:
        page.evaluate(
            "hash => { location.hash = hash }", address(trained=trained, reference=reference, cards=cards, k=k)
        )
        page.wait_for_function(
            "k => document.querySelector('#yaml').textContent.includes(`num_generations: ${k}\\n`)", arg=k
        )
        yaml, python, commands = (page.text_content(f"#{name}") for name in ("yaml", "python", "command"))
        (tmp_path / "fit.yaml").write_text(yaml)
        settings = load_profile("fit.yaml")

        *before, predict, launch = commands.strip().splitlines()
        for line in before:
            subprocess.run(line, shell=True, check=True)
        assert predict.startswith("rloo-memory plan --profile fit.yaml --prompt 3000 ")
        args = plan.parse_args(shlex.split(predict)[2:])
        _, setup, _ = setup_from(args, settings)
        lengths = dict(prompt_tokens=3000, max_completion_length=512, num_generations=k, per_device_train_batch_size=k)
        mine = replace(on_cards(TRAINED[trained], cards), **lengths, beta=0.05 * reference)
        assert not setup.rounds_updates_away
        if trained == "all":  # then nothing reads how LoRA would be
            setup = replace(setup, lora_target_modules="all-linear", lora_dropout=0.0)
        if trained != "lora-4-bits":
            setup = replace(setup, nested_scales=True)
        for arm in ARMS:
            assert planned(arm, setup) == planned(arm, mine)
        assert room_of(args.device_memory, None) == Room(int(23.5 * GIB) - DATA["reserve_bytes"], DATA["fragments"])
        assert launch.split()[:2] in (["rloo-memory", "launch"], ["accelerate", "launch"])
        assert f"hub:{MODEL}" in launch
        assert cards == 1 or (tmp_path / shlex.split(launch)[3]).exists()
        check_python(python, settings, monkeypatch)


def check_python(source: str, settings: dict, monkeypatch) -> None:
    """Runs it up to the trainer, on this machine's CPU; what it makes says the same as the profile."""
    import trl
    from trl import ModelConfig, RLOOConfig, get_peft_config, get_quantization_config

    monkeypatch.setattr(trl, "RLOOConfig", partial(RLOOConfig, use_cpu=True))
    body = ast.parse(source).body
    trainer = next(node for node in body if isinstance(node, ast.Assign) and node.targets[0].id == "trainer")
    made = {}
    exec(compile(ast.Module(body[: body.index(trainer)], []), "fit.py", "exec"), made)
    monkeypatch.setattr(trl, "RLOOConfig", RLOOConfig)
    config = {name: value for name, value in settings.items() if hasattr(made["args"], name)}
    assert {name: getattr(made["args"], name) for name in config} == config and len(config) > 8
    assert made["args"].model_init_kwargs == {"dtype": settings["dtype"]}
    model = ModelConfig(
        **{name: value for name, value in settings.items() if name in ModelConfig.__dataclass_fields__}
    )
    assert (made["lora"].to_dict() if "lora" in made else None) == ((p := get_peft_config(model)) and p.to_dict())
    assert (made["bits"].to_dict() if "bits" in made else None) == (
        (b := get_quantization_config(model)) and b.to_dict()
    )
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in trainer.value.keywords}
    wanted = {"reward_funcs": "my_reward", "args": "args", "train_dataset": "my_dataset"}
    wanted |= {"peft_config": "lora"} if "lora" in made else {}
    assert passed == wanted | ({"quantization_config": "bits"} if "bits" in made else {})
    assert ast.literal_eval(trainer.value.args[0]) == settings["model_name_or_path"]
    assert set(passed) <= inspect.signature(trl.RLOOTrainer.__init__).parameters.keys()
