"""Planner, doctor and launcher on the TRL in FOLDER, or "-": the one that is installed. JSON: the bytes of the phases
that are planned by device and arm, what a refusal says, and what became of a training.

    release.py FOLDER MODEL
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

if sys.argv[1] != "-":
    sys.path.insert(0, sys.argv[1])
import torch

from rloo_memory import models
from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import command_line
from rloo_memory.plan import __main__ as plan
from rloo_memory.plan import doctor
from rloo_memory.plan.ask import predict
from rloo_memory.settings import profiles
from tests.small_profile import small_profile

MODEL = "--model tiny-qwen3 --prompt 200 --completion 32 --k 4"
PROFILE = small_profile(
    4, 8, prompt_tokens=200, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    gradient_checkpointing_kwargs={"every_n_layers": 2},
)  # fmt: skip


def said(main, words: str) -> str:
    """Of a command that ends well what it printed, of another its last line."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words.split())
    return out.getvalue() if code == 0 else err.getvalue().splitlines()[-1]


def planned(device: str, arms: str) -> dict | str:
    words = said(plan.main, f"{MODEL} --device {device} --arms {arms} --json plan.json")
    if not Path("plan.json").exists():
        return words
    predictions = json.loads(Path("plan.json").read_text())["predictions"]
    Path("plan.json").unlink()
    return {each["arm"]: [phase["total"] for phase in each["phases"]] for each in predictions}


def reference_beside(model) -> int:
    """Bytes of the reference that TRL loads beside an object, for each of its weights."""
    args = dict(max_completion_length=8, num_generations=2, per_device_train_batch_size=2)
    kinds = predict(args, model, 16).phases[0].kinds
    return round(kinds["reference"] / sum(parameter.numel() for parameter in model.parameters()))


def parsed(profile: str, algorithm: str) -> str:
    words = (profile, "--algorithm", algorithm, "--activation_offloading", "false", "--use_cpu", "true")
    try:
        return type(command_line.parse(list(words))[1]).__name__
    except ConfigError as error:
        return str(error)


os.environ["MODEL_PATH"] = sys.argv[2]
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    Path("profile.yaml").write_text(PROFILE)
    config = models.named_config("tiny-qwen3")
    result = {
        "cuda": planned("cuda", "stock,stock-1.14,shared"),
        "cpu": planned("cpu", "stock,shared"),
        "doctor": said(doctor.main, f"{MODEL} --device-memory 1GiB --output fits.yaml"),
        "parsed": {
            algorithm: [parsed(name, algorithm) for name in profiles.names()] for algorithm in ("rloo", "grpo")
        },
        "reference": reference_beside(models.auto_class(config).from_config(config, dtype=torch.bfloat16)),
        "trained": [
            said(launch.main, f"profile.yaml --prefix_sharing {on} --predict_memory {on}") for on in ("true", "false")
        ],
    }
print(json.dumps(result))
