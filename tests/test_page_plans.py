"""Predicted figures in docs, predicted anew: a page that says otherwise fails."""

import json
import re
from statistics import median

import pytest
import yaml
from test_figures import says, table_of

from experiments.checks.published_peaks import FOLDER, predicted_for, setup_of
from experiments.config import ROOT
from experiments.record import read_csv
from rloo_memory.plan.accuracy.reserve import FIXED, comes_and_goes
from rloo_memory.plan.options import quiet
from rloo_memory.sizes import GIB

pytestmark = [pytest.mark.slow, pytest.mark.torch]
ARMS = ("stock", "stock-accumulate", "shared")
LORA = "--model Qwen/Qwen3-8B --lora 16"


@pytest.fixture
def peaks(planned, tmp_path):
    """What the planner predicts for each arm: name -> phase. Words are its options, settings those of a profile."""

    def ask(words, *arms, **settings):
        profile, path = tmp_path / "profile.yaml", tmp_path / "plan.json"
        profile.write_text(yaml.safe_dump(settings))
        options = (*words.split(), "--arms", ",".join(arms), "--json", path)
        result = planned(*options, *(("--profile", profile) if settings else ()))
        assert result.returncode == 0, result.stderr
        predicted = {each["arm"]: each["phases"] for each in json.loads(path.read_text())["predictions"]}
        return [{phase["phase"]: phase for phase in predicted[arm]} for arm in arms]

    return ask


def gib(size, digits=1):
    return f"{size / GIB:.{digits}f}"


def test_many_and_long_completions(peaks):
    for prompt, completion, k, *figures in table_of("docs/worth.md", "| prompt | completion | k | generation |"):
        words = f"{LORA} --prompt {prompt} --completion {completion} --k {k}"
        (passes,) = peaks(f"{words} --tokens-per-forward {2 * (int(completion) + 1)}", "shared")
        micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": int(k) // 2}
        micro |= {"num_generations": int(k), "dtype": "bfloat16"}
        parts, whole = peaks(words, "shared", "stock", **micro)
        found = [passes["generate"], passes["train"], parts["train"], whole["generate"], whole["train"]]
        assert figures == [gib(phase["total"]) for phase in found], words


def test_activations_on_the_host(peaks):
    for prompt, completion, k, *figures in table_of("docs/worth.md", "| prompt | completion | k | device |"):
        words = f"{LORA} --prompt {prompt} --completion {completion} --k {k}"
        words += f" --tokens-per-forward {2 * (int(completion) + 1)}"
        found = []
        for offloading in ("", " --activation-offloading"):
            (shared,) = peaks(words + offloading, "shared")
            train = shared["train"]
            found += [gib(train["total"], 2), gib(train["kinds"]["activations"], 2)]
        assert figures == [*found, gib(train["host"])], words


def test_batch_and_groups(peaks):
    def peak(arm, batch, words="", **settings):
        settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 16 // batch}
        words += "--model Qwen/Qwen3-0.6B --prompt 1000 --completion 256"
        (phases,) = peaks(words, arm, num_generations=8, beta=0.0, **settings)
        return max(phases.values(), key=lambda each: each["total"])

    every = {"dtype": "float32"}
    lora = {
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_dropout": 0.0,
        "lora_r": 16,
        "lora_target_modules": "all-linear",
    }
    shared = {"prefix_sharing": True}
    passes = shared | {"tokens_per_forward": 2 * (256 + 1)}
    columns = [("stock", 2, {}), ("shared", 2, shared), ("shared", 8, passes), ("shared", 16, passes)]
    found = [
        [what, *(gib(peak(arm, batch, **trained, **more)["total"]) for arm, batch, more in columns)]
        for what, trained in {"every weight, in float32": every, "LoRA, rank 16": lora}.items()
    ]
    assert table_of("docs/launch.md", "| GiB | batch 2 x 8, not shared |") == found
    ddp = f"--accelerate {ROOT / 'rloo_memory/settings/accelerate/ddp.yaml'} "
    reduced = peak("shared", 2, ddp, **every, **shared)
    without = gib(reduced["total"] - reduced["kinds"]["other"])
    says(
        "docs/launch.md",
        f"On several devices, every weight trained, the second column is {gib(reduced['total'])} ({without} of it "
        "without DDP's buckets)",
    )


def test_a_hybrid_and_an_image(peaks):
    text = (ROOT / "docs" / "predictions.md").read_text()
    found = re.findall(r"rloo-memory plan (--model (?:Qwen/Qwen3.5-9B|Qwen/Qwen2.5-VL-7B)[^`\n]*)", text)
    assert len(found) == 2
    for words in found:
        sizes = [gib(max(each["total"] for each in phases.values())) for phases in peaks(words, *ARMS)]
        says(
            "docs/predictions.md",
            f"it predicts {sizes[0]} GiB for `stock`, {sizes[1]} for `stock-accumulate` and {sizes[2]} for `shared`",
        )


def test_what_the_allocator_wastes():
    """Reserved beyond allocated, of what is predicted to come and go, where one training tells both."""
    told, known, shares = {}, {}, []
    for row in read_csv(FOLDER / "gpu_peaks.csv"):
        training = tuple(row[name] for name in ("source", "card", "model", "settings", "prompt_tokens", "arm"))
        told.setdefault(training, {})[row["metric"]] = row
    with quiet():
        for rows_of in told.values():
            if {"allocated", "reserved"} <= rows_of.keys():
                row = rows_of["reserved"]
                setup = setup_of(row)
                predicted_for(row, setup, known)
                peak = known[setup, row["model"], row["text_only"]].peak
                beyond = float(row["measured_gib"]) - float(rows_of["allocated"]["measured_gib"])
                shares.append(beyond * GIB / comes_and_goes(peak))
    assert f"{median(shares):.2f}" == f"{FIXED}"
    says(
        "docs/predictions.md",
        f"In the {len(shares)} published trainings that tell both, without expandable segments, that was "
        f"{min(shares):.2f} to {max(shares):.2f} of what comes and goes (everything but weights, gradients and "
        f"moments), with a median of {FIXED}",
    )
