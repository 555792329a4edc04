"""Runs become corrections of predictions: what counts, what the numbers mean, and who uses them."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_profile import small_profile

from experiments.record import write_csv
from experiments.run_record import PHASE_COLUMNS
from rloo_memory.device import cpu_name, machine_name
from rloo_memory.errors import ConfigError
from rloo_memory.launch import gate
from rloo_memory.plan import __main__ as plan
from rloo_memory.plan import ask, doctor
from rloo_memory.plan.accuracy import calibration
from rloo_memory.plan.accuracy.calibrate import calibration_of, measured_run
from rloo_memory.plan.accuracy.calibration import CalibratedPeak, Spread, load, range_of
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.options import reserve_of
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.sizes import GIB

MIB = 2**20
PHASES = ("generate", "score", "train", "optimizer")
PREDICTED = dict(zip(PHASES, (100 * MIB, 200 * MIB, 400 * MIB, 300 * MIB), strict=True))
START = 500 * MIB
VERSIONS = {package: version(package) for package in ("torch", "transformers")}
PEAKS = [PredictedPeak(phase, size, {"activations": size}, 0) for phase, size in PREDICTED.items()]
_begun = iter(range(10**6))


def run_folder(folder, ratio=1.0, updates=3, cuda=False, rows=None, files=(), **changed):
    """A launcher's output folder. From the second update on, each phase took `ratio` times what was predicted; the
    first one took another amount, as without the optimizer's state, or while libraries load. `files` are pairs of a
    name and what is in its place, None for nothing."""
    record = {
        "device_kind": "cuda" if cuda else "cpu", "machine": "one", "device_name": "The One", "versions": VERSIONS,
        "commit": "abc", "start_bytes": START, "predicted_peaks": {"load": 50 * MIB, **PREDICTED},
        "predicted_prompt_tokens": 1000, "prompt_tokens": 990, "completion_tokens": 64, "out_of_memory": None,
        "peaks": {}, "arguments": {"max_completion_length": 64, "use_vllm": False},
    }  # fmt: skip
    if rows is None:
        begun = next(_begun)
        rows = [{"phase": "load", "step": 0, "start": begun, "end": begun, "peak_resident_bytes": 9 * GIB}]
        for step in range(1, updates + 1):
            for phase, size in PREDICTED.items():
                size = round(size * (5 if step == 1 else ratio if step == 2 else 0.9 * ratio))
                sizes = {"peak_resident_bytes": START + size}
                if cuda:
                    sizes |= {"peak_allocated_bytes": size, "peak_reserved_bytes": 2500 * MIB}
                    sizes |= {"device_used_bytes": 3000 * MIB}
                rows.append({"phase": phase, "step": step, "start": begun + step, "end": begun + step, **sizes})
    folder.mkdir()
    (folder / "memory.json").write_text(json.dumps(record | changed))
    write_csv(folder / "memory_phases.csv", PHASE_COLUMNS, rows)
    for name, text in files:
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
    return folder


@pytest.fixture
def three(tmp_path):
    """A calibration's file from three runs."""
    ratios = {"a": 1.2, "b": 1.0, "c": 1.1}
    found = calibration_of([measured_run(run_folder(tmp_path / name, ratio)) for name, ratio in ratios.items()])
    return written(tmp_path / "calibration.json", found)


def written(path, found):
    path.write_text(json.dumps(calibration.as_json(found)))
    return path


def said(capsys, arguments, code):
    assert plan.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


def test_a_factor_is_the_median_of_measured_over_predicted_from_the_second_update_on(three):
    found = load(three)
    assert set(found.phases) == set(PHASES) and len(found.runs) == 3 and found.device_name == "The One"
    for factor in found.phases.values():
        assert (factor.low, factor.expected, factor.high) == pytest.approx((1.0, 1.1, 1.2), abs=1e-6)
        assert factor.runs == 3
    assert found.context == Spread(START, START, START, 3) and found.reserve is None
    assert found.kept_bytes == START and reserve_of(None, found) == "500MiB" and reserve_of("1GiB", found) == "1GiB"


def test_three_runs_give_the_range_and_the_parts_still_add_up(three):
    found = load(three)
    load_phase = PredictedPeak("load", 50 * MIB, {"parameters": 50 * MIB}, 0)
    peaks = found.corrected([load_phase, *PEAKS])
    assert peaks[0] == load_phase, "nothing was measured of it"
    for peak, before in zip(peaks[1:], PEAKS, strict=True):
        assert isinstance(peak, CalibratedPeak) and peak.uncorrected == before.total == before.uncorrected
        assert peak.total == pytest.approx(1.1 * before.total, rel=1e-6) == sum(peak.kinds.values())
        assert (peak.low, peak.high) == pytest.approx((before.total, 1.2 * before.total), rel=1e-6)
    assert range_of(peaks) == pytest.approx((400 * MIB, 440 * MIB, 480 * MIB), rel=1e-6)
    same = replace(found, phases=dict.fromkeys(PHASES, Spread(1.1, 1.1, 1.1, 3)))
    assert range_of(same.corrected(PEAKS)) == (round(440 * MIB),) * 3, "not widened"


def test_the_range_of_fewer_runs_is_widened_by_the_errors_measured_elsewhere(tmp_path):
    runs = [measured_run(run_folder(tmp_path / name, ratio)) for name, ratio in (("a", 1.1), ("b", 1.1))]
    errors = measured_errors()
    low, expected, high = range_of(calibration_of(runs).corrected(PEAKS))
    assert errors.low < 1 < errors.high
    assert (low, expected, high) == pytest.approx([440 * MIB * x for x in (errors.low, 1, errors.high)], rel=1e-6)
    apart = calibration_of([runs[0], measured_run(run_folder(tmp_path / "c", 3.1))])
    assert range_of(apart.corrected(PEAKS)) == pytest.approx((440 * MIB, 840 * MIB, 1240 * MIB), rel=1e-6)


def test_on_cuda_it_is_what_torch_allocates_and_the_rest_is_context_and_reserve(tmp_path):
    """The start level is not taken off. Of a device that others use, the context is not known."""
    found = calibration_of([measured_run(run_folder(tmp_path / "a", 1.25, cuda=True))])
    assert found.phases["train"].expected == pytest.approx(1.25, abs=1e-6)
    assert found.context.expected == 500 * MIB
    assert found.reserve.expected == 500 * MIB, "2,500 reserved; the highest allocated is the first update's, 2,000"
    assert reserve_of(None, found) == "1000MiB"
    shared = measured_run(run_folder(tmp_path / "b", 1.25, cuda=True, start_bytes=20 * GIB))
    assert shared.context is None and calibration_of([shared]).kept_bytes is None
    assert reserve_of(None, calibration_of([shared])) is None


def test_the_command_shows_the_runs_and_writes_the_file(tmp_path, capsys, monkeypatch):
    """Once for each run, however its folder is named. Without --out it is this machine's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    one, two = run_folder(tmp_path / "one", 1.2), run_folder(tmp_path / "two", 1.1)
    (tmp_path / "link").symlink_to(one)
    shutil.copytree(two, tmp_path / "copy")
    out = said(capsys, ["--calibrate", one, two, tmp_path / "link", tmp_path / "copy", one], 0).out
    path = tmp_path / "rloo-memory" / "one" / "calibration.json"
    rows = [line.split() for line in out.splitlines() if line.startswith(str(tmp_path)) and line.endswith("0")]
    assert rows == [
        [str(folder), phase, f"{size / GIB:.3f}", f"{size * ratio / GIB:.3f}", f"{ratio:.3f}"]
        for folder, ratio in ((one, 1.2), (two, 1.1))
        for phase, size in PREDICTED.items()
    ]
    assert f"calibrated with 2 runs on The One ({path})\n" in out
    assert f"used by planner and doctor with --calibration {path}, by the launcher on this machine\n" in out
    values = json.loads(path.read_text())
    assert [run["folder"] for run in values["runs"]] == [str(one), str(two)]
    assert all(run["commit"] == "abc" and run["versions"] == VERSIONS for run in values["runs"])
    assert values["date"] and values["device_name"] == "The One" and values["phases"]["train"]["runs"] == 2
    out = said(capsys, ["--calibrate", one, "--out", path], 0).out
    assert f"calibrated with 1 run on The One ({path}) (replaced)\n" in out


LEFT_OUT = {
    "oom": ({"out_of_memory": "train"}, "ran out of memory in phase train"),
    "unpredicted": ({"predicted_peaks": {}}, "--predict_memory true"),
    "one-update": ({"updates": 1}, "train two or more"),
    "unknown-start": ({"start_bytes": None}, "train with the launcher"),
    "vllm": ({"arguments": {"max_completion_length": 64, "use_vllm": True}}, "vLLM"),
    "short-prompts": ({"prompt_tokens": 899}, "prompts of 1000 tokens and saw 899, less than 90%"),
    "short-completions": ({"completion_tokens": 57}, "completions of 64 tokens and saw 57, less than 90%"),
    "no-lengths": ({"completion_tokens": None}, "saw None"),
    "no-rows": ({"rows": [{"phase": "load", "step": 0, "start": 0}]}, "train two or more"),
    "cut-off": ({"files": [("memory.json", '{"machine": ')]}, "not a whole record (JSONDecodeError"),
    "older": (
        {"files": [("memory.json", '{"peaks": {}, "predicted_peaks": {"train": 5}}')]},
        "recorded by an older version",
    ),
    "no-columns": (
        {"files": [("memory_phases.csv", "phase,step\noptimizer,1\noptimizer,2\n")]},
        "not a whole record (KeyError",
    ),
    "no-phases": ({"files": [("memory_phases.csv", None)]}, "not a whole record (FileNotFoundError"),
}


@pytest.mark.parametrize(("changed", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_run_that_says_nothing_is_left_out_by_name(changed, reason, tmp_path, capsys):
    """Alone it is refused; beside one that counts, that one is the calibration."""
    bad, good = run_folder(tmp_path / "bad", **changed), run_folder(tmp_path / "good", 1.1)
    path = tmp_path / "x.json"
    error = said(capsys, ["--calibrate", bad, "--out", path], 2).err
    assert error.startswith(f"plan: no run that can be calibrated with: {bad} is left out: it ") and reason in error
    assert error.count("\n") == 1 and not path.exists()
    error = said(capsys, ["--calibrate", bad, good, "--out", path], 0).err
    assert error.startswith(f"plan: {bad} is left out: it ") and reason in error and error.count("\n") == 1
    assert len(load(path).runs) == 1 and load(path).phases["train"].expected == pytest.approx(1.1, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--calibrate", "one", "other-machine"], ["machines: one is of one (The One)", "other-machine is of two"]),
        (["--calibrate", "one", "other-torch"], ["different versions of torch", "other-torch is of 1.9"]),
        (["--calibrate", "one", "no-run"], ["no-run holds no memory.json"]),
        (["--calibrate", "one", "--model", "qwen3-8b", "--k", "4"], ["leave out --model, --k"]),
        (["--calibrate", "one", "--out", "no/such/x.json"], ["cannot write no/such/x.json"]),
        (["--calibrate", "one", "--out", "no-run"], ["cannot write no-run"]),
        (["--out", "x"], ["no model", "--out x is for --calibrate"]),
        (["--calibration", "gone"], ["no model", "cannot read the calibration gone"]),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(arguments, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folder(Path("one"))
    run_folder(Path("other-machine"), machine="two")
    run_folder(Path("other-torch"), versions=VERSIONS | {"torch": "1.9.0"})
    Path("no-run").mkdir()
    error = said(capsys, arguments, 2).err
    assert error.startswith("plan: ") and error.count("\n") == 1 and all(part in error for part in parts), error


@pytest.mark.parametrize("text", ["{", "[5]", "{}", '{"phases": {"train": null}, "runs": []}'])
def test_another_file_is_no_calibration(text, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match="other.json is not a calibration .*--calibrate RUN_DIR... writes one$"):
        load(tmp_path / "other.json")


def test_a_cpus_factors_are_not_a_gpus_and_an_upgrade_needs_new_ones(three):
    found = load(three)
    found.check("cpu")
    with pytest.raises(ConfigError, match="is of a CPU, The One, and this is a prediction for a GPU"):
        found.check("cuda")
    with pytest.raises(ConfigError, match="is of a CPU"):
        ask.predict({}, "tiny-qwen3", 8, calibration=three)
    with pytest.raises(ConfigError, match="is of torch 1.9.0, here is .*; calibrate again"):
        replace(found, versions=VERSIONS | {"torch": "1.9.0"}).check("cpu")
    replace(found, versions=VERSIONS | {"torch": calibration.minor(VERSIONS["torch"]) + ".99"}).check("cpu")


@pytest.mark.parametrize(("times", "corrected"), [(0.24, False), (0.26, True), (3.9, True), (4.1, False)])
def test_a_peak_of_quite_another_size_is_left_as_it_is_and_said(three, times, corrected):
    found = load(three)
    peaks = [replace(peak, total=round(times * peak.total)) for peak in PEAKS]
    after = found.corrected(peaks)
    assert (after != peaks) == corrected
    lines = found.said_of({"this": after, "that": found.corrected(PEAKS)})
    assert lines[0] == f"calibrated with 3 runs on The One ({three})"
    assert [line.split(" GiB")[0] for line in lines[1:]] == (
        [] if corrected else [f"not calibrated: this {times * 400 * MIB / GIB:.2f}"]
    )
    assert len(found.said_of({"this": after})) == 1


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The launcher's configuration on this CPU, whose own calibration lies in `tmp_path`."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return SimpleNamespace(device=SimpleNamespace(type="cpu"))


def test_the_launcher_takes_this_machines_own_unless_told_otherwise(three, launched, capsys):
    here = machine_name("cpu", cpu_name())
    path = calibration.file_of(here)
    assert gate.calibration_here(None, launched) is None
    path.parent.mkdir(parents=True)
    written(path, replace(load(three), machine=here))
    assert gate.calibration_here(None, launched) == load(path) and gate.calibration_here("none", launched) is None
    assert capsys.readouterr().out == ""
    assert gate.calibration_here(str(three), launched) == load(three)
    assert capsys.readouterr().out == f"memory  {three} is of another machine, one; this is {here}\n"
    for text in ("{", json.dumps(json.loads(path.read_text()) | {"versions": {"torch": "1.9", "transformers": "5"}})):
        path.write_text(text)
        assert gate.calibration_here(None, launched) is None, "nobody asked for it: it keeps nobody from training"
        assert capsys.readouterr().out.startswith("memory  not calibrated: ")
        with pytest.raises(ConfigError):
            gate.calibration_here(str(path), launched)


@pytest.mark.torch
def test_the_planner_corrects_and_names_it(planned, tmp_path, three):
    words = (
        "--model tiny-qwen3 --prompt 64 --completion 16 --k 4 --arms stock --device cpu --device-memory 1GiB".split()
    )
    plain = planned(*words, "--json", tmp_path / "plain.json")
    assert plain.returncode == 0 and "calibrat" not in plain.stdout
    before = json.loads((tmp_path / "plain.json").read_text())
    assert "calibration" not in before and set(before["predictions"][0]["phases"][0]) == {
        "phase", "total", "kinds", "host"
    }  # fmt: skip
    peak = max(phase["total"] for phase in before["predictions"][0]["phases"])
    near = written(tmp_path / "near.json", replace(load(three), predicted_peaks=(peak, peak)))
    result = planned(*words, "--calibration", near, "--json", tmp_path / "after.json")
    assert result.returncode == 0, result.stderr
    assert f"calibrated with 3 runs on The One ({near})\n" in result.stdout and "above start, GiB" in result.stdout
    assert "took 1.00 to 1.20 of the predicted" in result.stdout and "1GiB less 500MiB reserved" in result.stdout
    after = json.loads((tmp_path / "after.json").read_text())
    assert after["calibration"]["file"] == str(near) and after["calibration"]["device_name"] == "The One"
    for old, new in zip(before["predictions"][0]["phases"], after["predictions"][0]["phases"], strict=True):
        factor = 1 if old["phase"] == "load" else 1.1
        assert new["total"] == pytest.approx(factor * old["total"], abs=2), old["phase"]
    result = planned(*words, "--calibration", written(tmp_path / "far.json", load(three)))
    assert result.returncode == 0 and "calibrated with" not in result.stdout
    assert "not calibrated: stock 0." in result.stdout and "calibrate with a run of that size" in result.stdout
    result = planned(*words[:-4], "--calibration", near)
    assert result.returncode == 2 and "(--device cpu predicts for its own)" in result.stderr


@pytest.mark.torch
def test_the_doctor_decides_by_the_corrected_peak(tmp_path, three, monkeypatch, capsys):
    def predict(label, setup, hf_config, calibration=None):
        return Prediction(label, setup, calibration.corrected(PEAKS) if calibration else PEAKS)

    monkeypatch.setattr(doctor, "predict", predict)
    monkeypatch.setattr(
        doctor,
        "predict_all",
        lambda setups, config, say, found=None: [predict(label, s, config, found) for label, s in setups.items()],
    )
    words = "--model tiny-qwen3 --prompt 64 --device cpu --device-memory 920MiB".split()  # 420 MiB less the context
    words += ["--output", str(tmp_path / "fits.yaml")]
    assert doctor.main([*words, "--reserve", "500MiB"]) == 0 and "nothing is needed" in capsys.readouterr().out
    assert doctor.main([*words, "--calibration", str(three)]) == 1
    out = capsys.readouterr().out
    assert f"calibrated with 3 runs on The One ({three})" in out and "0.43 GiB with every lever" in out


PROFILE = small_profile(4, 8, prompt_tokens=128, max_steps=3)


@pytest.mark.slow
@pytest.mark.torch
def test_a_training_is_nearer_to_what_two_others_say_than_to_the_prediction_alone(forked, tmp_path, capsys):
    """Each in a process of its own, so that all begin at the same level."""
    (tmp_path / "profile.yaml").write_text(PROFILE)

    def train(name, *words):
        words = ("--model_name_or_path", "random:tiny-qwen3", "--output_dir", tmp_path / name, *words)
        result = forked("launch_measured", tmp_path / "profile.yaml", *words)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    path = tmp_path / "calibration.json"
    for name in ("a", "b"):
        assert "calibrated" not in train(name, "--calibration", "none")
    assert (
        "calibrated with 2 runs" in said(capsys, ["--calibrate", tmp_path / "a", tmp_path / "b", "--out", path], 0).out
    )
    out = train("c", "--calibration", path, "--seed", 7)
    assert f"memory  calibrated with 2 runs on {load(path).device_name} ({path})\n" in out
    assert "GiB in phase" in out and ", calibrated 0." in out and "above the level before the model" in out
    run, record = measured_run(tmp_path / "c"), json.loads((tmp_path / "c" / "memory.json").read_text())
    assert record["calibrated_peaks"].keys() == set(PHASES)
    phase = max(PHASES, key=run.predicted.get)
    before, after = run.predicted[phase], record["calibrated_peaks"][phase]
    assert after == pytest.approx(before * load(path).phases[phase].expected, abs=1)
    assert abs(after - run.measured[phase]) < abs(before - run.measured[phase]), (before, after, run.measured[phase])
