"""The doctor's settings are trained with, and what is refused says why. Which of its changes train the same."""

import json
import os
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml

from experiments.config import resolve
from experiments.record import read_csv
from experiments.workload import run_models
from rloo_memory import data
from rloo_memory.plan import doctor, records, speed
from rloo_memory.plan.accuracy.calibration import load
from rloo_memory.plan.levers import LEVERS, SHARING, applied
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.records import read_run
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import changes, from_settings, with_changes
from rloo_memory.settings import profiles


@pytest.mark.slow
def test_what_the_doctor_writes_trains_and_what_was_recorded_corrects_the_plan(planned, forked, capsys, tmp_path):
    """A model that does not fit, the YAML that does, a training with it, and what is read from that training's folder:
    the settings, and how many times what was predicted it took."""
    policy, reward, _ = run_models.prepare(resolve("stock", 2, "test", "cpu"), data.load_documents())
    fits, out = tmp_path / "fits.yaml", tmp_path / "out"
    words = (
        f"--model {policy} --prompt 512 --completion 16 --k 4 --device cpu --dtype float32 "
        f"--device-memory 275MiB --reserve 250MiB --output {fits} --reward-model {reward} "
        f"--offload-reward"
    )
    assert doctor.main(words.split()) == 0
    said, text = capsys.readouterr().out, fits.read_text()
    assert "prefix_sharing: true" in text and "offload_reward: true" in text and "max_prompt_tokens: 512" in text
    assert f"  rloo-memory launch {fits} --dataset_name" in said and "Trains the same as before" in said
    peaks = [float(line.split()[0]) for line in said.splitlines() if "trains " in line]
    assert peaks == sorted(peaks) and len(peaks) > 5, "each change alone, in order of effect"

    words = (
        f"{fits} --max_steps 3 --output_dir {out} --prompt_tokens 512 --logging_steps 1 --save_strategy "
        f"no --report_to none --disable_tqdm true --offload_reference true"
    )
    launched = forked("rloo_memory.launch", *words.split())
    assert launched.returncode == 0, launched.stderr[-3000:]
    for metric in ("mem_alloc_mb", "mem_max_alloc_mb", "mem_peak/train_mb", "mem_peak/generate_mb"):
        assert metric in launched.stdout

    old = read_run(out)
    assert (old.prompt_tokens, old.settings["num_generations"], old.settings["dtype"]) == (512, 4, "float32")
    assert old.settings["offload_reference"] and old.settings["offload_reward"] and old.settings["use_cpu"]
    assert old.where["reward_model"] == old.settings["reward_model_name_or_path"] == str(reward)
    assert old.hf_config.vocab_size == 512 and max(old.peaks.values()) > 100 * 2**20

    rows, recorded = read_csv(out / "memory_phases.csv"), json.loads((out / "memory.json").read_text())
    assert {row["phase"] for row in rows} >= {"generate", "score", "train", "optimizer"}
    trains = [int(row["peak_resident_bytes"]) for row in rows if row["phase"] == "train" and int(row["step"]) > 1]
    found = load(out, "cpu").factors["train"] * recorded["predicted_peaks"]["train"]
    assert found == pytest.approx(max(trains) - recorded["start_bytes"])
    words = f"--model {policy} --prompt 512 --completion 16 --device cpu --arms stock --calibration {out}"
    said = planned(*words.split()).stdout
    assert f"what {out} measured: generate x " in said
    # The run's own training, but for what it was told to offload and to generate together
    (seconds,) = re.findall(r"^stock: scoring ([\d.]+) s, training ([\d.]+) s an update$", said, re.MULTILINE)
    assert all(0.01 < float(each) < 60 for each in seconds)


RECORD = {
    "device_kind": "cuda", "device_bytes": 24 * 2**30, "peaks": {"train": 30 * 2**30}, "prompt_tokens": 2000,
    "model_config": {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 500},
    "reward_model": None, "not_recorded": ["generation_kwargs"],
    "devices": {"num_devices": 1, "fully_sharded": False, "offload_parameters": False},
    "settings": {
        "dtype": "bfloat16", "use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear",
        "max_completion_length": 512, "num_generations": 4, "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "gradient_accumulation_steps": 2, "prefix_sharing": False, "bf16": True,
        "gradient_checkpointing": True, "beta": 0.0, "optim": "adamw_torch", "temperature": 0.7,
    },
}  # fmt: skip


def test_a_run_with_deepspeed_is_read_as_such():
    devices = {"zero_stage": 3, "offload_optimizer": True, "num_devices": 2}
    assert records.memory_record(RECORD | {"devices": devices}).where == devices | {"device": "cuda"}


def folder_with(tmp_path, **changed):
    (tmp_path / "memory.json").write_text(json.dumps(RECORD | changed))
    return tmp_path


def faked(monkeypatch, peak, shared=(3, 1)):
    """The doctor without simulations: `peak` gives a setup's bytes; `shared` is its work with shared prompts."""

    def predict(label, setup):
        peaks = [PredictedPeak("train", peak(setup), {"activations": peak(setup)}, 0)]
        work = Counter({shared if setup.prefix_sharing else (9, 3): 1})
        return Prediction(label, setup, peaks, {"score": work, "train": work})

    monkeypatch.setattr(doctor, "predict_all", lambda setups, *rest: [predict(*each) for each in setups.items()])


def made_up_peak(setup: Setup) -> int:
    """Smaller with each lever, by amounts of the kind that real ones have."""
    weights = 4e9 * (setup.weight_bits / 16) * (2 if setup.dtype == "float32" else 1)
    trained = (
        0 if setup.lora_rank else weights * (1 + {"adamw_bnb_8bit": 0.5, "paged_adamw_8bit": 0.1}.get(setup.optim, 2))
    )
    reference = 0 if setup.lora_rank or not setup.beta or setup.offload_reference else weights
    rows = 1 + setup.num_generations * (0.3 if setup.prefix_sharing else 1)
    rows *= 0.5 if setup.rows_per_pass == 1 or setup.per_device_train_batch_size == 1 else 1
    activations = rows * (setup.prompt_tokens + setup.max_completion_length) * 2e5
    activations *= 1 if setup.gradient_checkpointing else 3
    activations *= 0.7 if setup.activation_offloading else 1
    generation = setup.steps_per_generation * setup.num_generations * 5e7
    return int(weights + trained + reference + activations + generation)


def written(path):
    """(settings of a file, settings that its comments name as decided by levers)."""
    text = path.read_text()
    named = dict(re.findall(r"^#   (\w+)(?: is removed|: (.*))$", text, re.MULTILINE))
    return yaml.safe_load(text), {name: yaml.safe_load(value) if value else None for name, value in named.items()}


def test_it_writes_its_file_also_where_nobody_reads_what_it_prints(tmp_path, monkeypatch):
    """As in `rloo-memory doctor ... | head -1`."""
    faked(monkeypatch, made_up_peak)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        words = f"--model qwen3-0.6b --prompt 2000 --device-memory 9GiB --output {tmp_path / 'fits.yaml'}"
        assert doctor.main(words.split()) == 0 and written(tmp_path / "fits.yaml")[0]["max_prompt_tokens"] == 2000


BUDGETS = [70, 50, 30, 22, 14, 9, 6, 4.5, 3]


@pytest.mark.parametrize("source", ["options", "run", "profile"])
def test_the_settings_are_the_users_own_with_the_levers_changes_and_the_comments_name_them(
    source, tmp_path, monkeypatch, capsys
):
    """From much memory to little, so that each lever is needed once, and left out where a later one replaces it."""
    faked(monkeypatch, made_up_peak)
    own = dict(
        algorithm="grpo", learning_rate=3e-5, beta=0.04, dtype="float32", num_generations=8, warmup_steps=7,
        gradient_accumulation_steps=4, gradient_checkpointing=False, lora_target_modules=["q_proj", "v_proj"],
        lora_dropout=0.1, optim="adamw_torch", max_completion_length=512, temperature=0.6,
    )  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    start, expected = {
        "options": ("--model qwen3-0.6b --prompt 2000 --no-gradient-checkpointing --dtype float32".split(), {}),
        "run": ([str(folder_with(tmp_path))], read_run(tmp_path).settings),
        "profile": (
            ["--model", "qwen3-0.6b", "--prompt", "2000", "--profile", str(tmp_path / "own.yaml")],
            own | {"model_name_or_path": "qwen3-0.6b"},
        ),
    }[source]
    levers_seen, before = set(), None
    for budget in BUDGETS:
        # The first file has nothing but what was given; sharing is in all others for its speed, also where all fits
        monkeypatch.setattr(speed, "is_faster", lambda *both, faster=before is not None: faster)
        output = tmp_path / f"{budget}.yaml"
        code = doctor.main([*start, "--device-memory", f"{budget}GiB", "--reserve", "0", "--output", str(output)])
        shown = capsys.readouterr().out
        if code == 1:
            assert "No settings are written" in shown and not output.exists()
            continue
        result, named = written(output)
        assert result["dtype"] == ("bfloat16" if result.get("use_peft") else "float32"), "no weights that are trained"
        if before is None:
            before = result
            assert not named and "nothing is needed" in shown and expected.items() <= result.items()
            assert source != "run" or "did not record algorithm, dataset_name, generation" in output.read_text()
        assert named == {name: result.get(name) for name in before | result if before.get(name) != result.get(name)}
        levers_seen |= set(re.findall("^# (.*?): trains", output.read_text(), re.MULTILINE))
        assert ("Trains the same" in shown) == ("trains differently" not in output.read_text() and bool(named))
    assert len(levers_seen) >= (3 if source == "run" else 6), levers_seen  # the run has LoRA already


@pytest.mark.parametrize("work, says", [((3, 1), "is 3.0 times faster"), ((18, 6), "takes 2.0 times as long")])
def test_sharing_is_written_for_its_speed_where_it_is_predicted_to_be_faster(
    work, says, monkeypatch, capsys, tmp_path
):
    faked(monkeypatch, made_up_peak, work)
    words, path = "--model qwen3-0.6b --prompt 2000 --device-memory 400GiB --output", tmp_path / "fits here.yaml"
    assert doctor.main([*words.split(), str(path)]) == 0
    said = capsys.readouterr().out
    assert f" launch '{path}' --dataset_name" in said, "as a shell takes it"
    assert f"training {says}" in said and ("takes less time" in said) == ("faster" in says)
    assert written(path)[0].get("prefix_sharing", False) == ("faster" in says)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["run folder", "--model"]),
        (["--model", "qwen3-8b", "--device-memory", "24GiB"], ["--prompt"]),
        (["no/such/folder"], ["no/such/folder", "memory.json"]),
        (["RUN", "--profile", "balanced"], ["leave out --profile balanced"]),
        (["RUN", "--model", "qwen3-32b"], ["leave out --model qwen3-32b"]),
        (["ENGINE"], ["no prompt length", "--prompt N"]),
        (["NESTED"], ["NESTED/memory.json is not a whole record (RecursionError: "]),
        (["IMAGES"], ["IMAGES/memory.json is not a whole record (TypeError: 'x' is no whole number)"]),
        (["FIELD"], ["FIELD/memory.json is not a whole record (TypeError: ", "'gpus'"]),
        (["MODEL"], ["MODEL/memory.json is not a whole record (", "vocab_size"]),
        (["--model", "qwen3-8b", "--prompt", "64", "--profile", "a.yaml", "--output", "a.yaml"], ["profile itself"]),
    ],
)
def test_the_doctor_says_what_is_missing(arguments, parts, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runs = {"RUN": {}, "ENGINE": {"prompt_tokens": None}, "IMAGES": {"images": "x"}}
    runs |= {"FIELD": {"devices": {"gpus": 2}}, "MODEL": {"model_config": {"model_type": "qwen3", "vocab_size": "x"}}}
    for name, changed in runs.items():
        (tmp_path / name).mkdir()
        folder_with(tmp_path / name, **changed)
    (tmp_path / "NESTED").mkdir()
    (tmp_path / "NESTED" / "memory.json").write_text("[" * 10**5)
    (tmp_path / "a.yaml").write_text("beta: 0.0\n")
    assert doctor.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("doctor: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error


@pytest.mark.slow
def test_levers_that_are_said_to_train_the_same_do(probe):
    """Weights after one update on given completions, in float32. Activations are offloaded, and vLLM sleeps, on a GPU
    only."""
    result = probe("exact_levers")
    assert result.pop("half the completion") > 0.1 and result.pop("steps_per_generation of two updates") > 0.1
    assert result.pop("said to be exact") == [False] and result.pop("update") > 1e-3
    shown = {name.partition(" of ")[0] for name in result}
    assert {"prefix_sharing of parts", "one completion a pass of shared parts"} <= result.keys()
    exact = {lever.name for lever in LEVERS if lever.same}
    assert shown == exact - {"activation_offloading", "vllm_enable_sleep_mode"}
    assert max(result.values()) < 1e-5, result


def test_sharing_is_the_same_only_if_an_update_has_whole_groups():
    whole = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=16, steps_per_generation=16)
    part = Setup(100, per_device_train_batch_size=1, gradient_accumulation_steps=4, steps_per_generation=8)
    assert SHARING.exact(whole) and not SHARING.exact(part)
    assert "trains differently" in SHARING.effect(part) and "token ratio" in SHARING.effect(part)


@pytest.mark.parametrize("own, experts", [({"loss_type": "bnpo"}, 0.0), ({}, 0.001)])  # the model's own coefficient
def test_other_micro_batches_train_differently_where_an_update_depends_on_them(own, experts):
    config = SimpleNamespace(output_router_logits=False, router_aux_loss_coef=experts)
    config.get_text_config = lambda: config
    batches = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4)
    for asked, same in ((own, False), ({"router_aux_loss_coef": 0.0}, True)):
        setup = from_settings(100, {"algorithm": "grpo", **batches, **asked}, config)
        levers = (lever for lever in LEVERS if lever.name in ("prefix_sharing", "one completion a pass"))
        assert [lever.exact(setup) for lever in levers] == [same, same]


@pytest.mark.slow
def test_an_update_depends_on_its_micro_batches_for_the_settings_that_are_said_to(probe):
    """Of every loss and the terms beside it, in untouched code: an update of 8 together against 8 of one each."""
    result = probe("settings_by_batch")
    assert len(result) == 16 and all(0 <= distance < 2 for _, distance, _ in result)
    wrong = [case for case in result if (case[1] > 1e-4) != bool(case[2]) or 1e-5 < case[1] < 1e-4]
    assert not wrong and 5 < sum(bool(reasons) for *_, reasons in result) < 12


OWN = {
    "algorithm": "grpo", "model_init_kwargs": {"dtype": "float32", "revision": "main"}, "num_generations": 6,
    "per_device_train_batch_size": 12, "steps_per_generation": 2, "lora_dropout": 0.3, "loss_type": "bnpo",
    "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True, "use_bnb_nested_quant": True,
    "optim": "adamw_bnb_8bit", "tokens_per_forward": 4000, "num_iterations": 3, "learning_rate": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("profile", ["own", *profiles.names()])
def test_settings_come_back_from_a_setup_as_they_were(profile):
    own = OWN if profile == "own" else profiles.load_profile(profile)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=10**6))
    setup = from_settings(100, own)
    assert with_changes(own, changes(setup, setup)) == own
    for lever in LEVERS:
        if trial := applied(lever, setup, config):
            changed = changes(setup, trial)
            new = with_changes(own, changed)
            assert from_settings(100, new) == trial, lever.name
            left = {name: value for name, value in own.items() if name not in changed and name != "model_init_kwargs"}
            assert left.items() <= new.items(), lever.name
