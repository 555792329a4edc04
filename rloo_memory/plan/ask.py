"""What a training will take, asked from Python: in a notebook, or by a program before it trains.

    from rloo_memory.plan.ask import predict

    expected = predict(args, "Qwen/Qwen3-8B", prompt_tokens=3000, peft_config=lora)
    print(f"{expected.peak.total / 2**30:.1f} GiB in {expected.peak.phase}: {expected.peak.parts()}")

One step is simulated in a process of its own, without a GPU: nothing of the caller's is touched. Sizes are what torch
allocates on a device; the CUDA context and the allocator's fragmentation come on top.
"""

import dataclasses
import enum
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_memory.adapters import lora_settings
from rloo_memory.errors import EXIT_USAGE, ConfigError, exit_code
from rloo_memory.installed_trl import need_trl, trl_version
from rloo_memory.plan.accuracy.calibration import load
from rloo_memory.plan.levers import LEVERS, applied
from rloo_memory.plan.options import model_config, quiet, settings_of_adapter
from rloo_memory.plan.peaks import PredictedPeak, Prediction
from rloo_memory.plan.predict import predict_all
from rloo_memory.plan.records import config_from
from rloo_memory.plan.remarks import remarks
from rloo_memory.plan.simulation.recurrent import note
from rloo_memory.plan.trl_settings import ALGORITHMS, changes, config_class, defaults, from_settings, in_kwargs

# What a process that starts under `accelerate launch` or torchrun would take for a place in their group
GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Remedy:
    """One change that makes a training fit: what the doctor calls it, the settings that do it (None takes one away),
    what it does to the training, and the peak with it in bytes."""

    name: str
    settings: dict
    effect: str
    peak: int


@dataclass(frozen=True)
class Expected:
    """The predicted peak of each phase of a step, and with a `limit` that it exceeds the change that the doctor would
    try first of those that make it fit alone. What is not sure of it, if anything, is in `note`
    (`rloo_memory.plan.simulation.recurrent`), and all that is said of it in `remarks`."""

    phases: tuple[PredictedPeak, ...]
    remedy: Remedy | None = None
    note: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def peak(self) -> PredictedPeak:
        return max(self.phases, key=lambda phase: phase.total)


def predict(
    config,
    model,
    prompt_tokens: int,
    *,
    peft_config=None,
    settings: dict | None = None,
    limit: int | None = None,
    calibration: Path | str | None = None,
    **where,
) -> Expected:
    """The peaks of a training.

    Args:
        config: an RLOOConfig or GRPOConfig, or a dictionary of their settings.
        model: name or folder as `rloo-memory plan --model` takes it, a transformers model, or its config.
        prompt_tokens: of the longest prompt.
        peft_config: a `peft.LoraConfig`, where adapters are trained.
        settings: more settings under TRL's names, such as `load_in_4bit`, or `dtype` of a model that is named (without
            one float32, as TRL loads it; "auto" is what its config says).
        limit: bytes; beyond it, a remedy is looked for, which takes a minute or some.
        calibration: the launcher's output folder of a run that corrects the peaks.
        where: other fields of `rloo_memory.plan.setups.Setup`, such as `num_devices`, `device="cpu"` or, of the images
            of a prompt, `images=((1280, 720),)`: `prompt_tokens` counts theirs, too.

    Raises:
        ConfigError: for settings that no trainer accepts, and for what cannot be predicted, with the reason.
    """
    of_adapters = lora_settings(vars(peft_config)) if peft_config else {}
    asked = {
        "settings": {**settings_of(config), **of_adapters, **plain(settings or {})},
        "model": model_in_text(model),
        "prompt_tokens": prompt_tokens,
        "limit": limit,
        "calibration": calibration and str(Path(calibration).absolute()),
        "where": where,
    }
    if hasattr(model, "dtype") and hasattr(model, "config"):  # `model_init_kwargs` are for the reference alone
        if asked["settings"].get("dtype") not in (None, "auto"):
            where.setdefault("reference_dtype", asked["settings"]["dtype"])
        elif trl_version() < (1, 16):
            where.setdefault("reference_dtype", "float32")
        asked["settings"]["dtype"] = str(model.dtype).removeprefix("torch.")
        asked["settings"]["attn_implementation"] = getattr(model.config, "_attn_implementation", None)
    result = in_its_own_process(asked)
    said = result.stderr.strip().splitlines()
    if result.returncode == EXIT_USAGE and said:
        raise ConfigError(said[-1].removeprefix("plan: "))
    if result.returncode:
        raise ConfigError(f"the planner ended with exit code {result.returncode}: {(said or ['without a word'])[-1]}")
    answer = json.loads(result.stdout.splitlines()[-1])
    remedy = Remedy(**answer["remedy"]) if answer["remedy"] else None
    phases = tuple(PredictedPeak(**phase) for phase in answer["phases"])
    stands_in = (line for line in said if line.endswith("stands in for it"))  # of a model that the hub does not give
    return Expected(phases, remedy, answer["note"], (*stands_in, *answer["remarks"]))


def in_its_own_process(asked: dict) -> subprocess.CompletedProcess:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in GROUP and not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_"))
    }
    packages = (Path(__file__).resolve().parents[2], need_trl())
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, packages))}
    command = [sys.executable, "-P", "-m", "rloo_memory.plan.ask"]  # -P: nothing of where the caller stands
    return subprocess.run(command, input=json.dumps(asked), env=environment, capture_output=True, text=True)


def settings_of(config) -> dict:
    """What is set in a trainer's config, or in a dictionary, as JSON can say it. What a user's own class adds to TRL's
    is no setting of the trainer."""
    if dataclasses.is_dataclass(config):
        trainer = config_class(config)
        names = [field.name for field in dataclasses.fields(trainer or config)]
        values = {name: getattr(config, name, None) for name in names}
        config = values | ({"algorithm": ALGORITHMS[trainer.__name__]} if trainer else {})
    return plain(config)


def plain(settings: dict) -> dict:
    """The settings that are set to something that JSON has a word for, and what the planner knows of arguments."""
    values = {name: x.value if isinstance(x, enum.Enum) else x for name, x in settings.items()}
    found = {name: x for name, x in values.items() if isinstance(x, str | int | float | list | tuple)}
    return found | in_kwargs(settings)


def model_in_text(model) -> str | dict:
    """A name, a folder's absolute path, or a config as a dictionary."""
    if isinstance(model, str | Path):
        return str(Path(model).absolute()) if Path(model).is_dir() else str(model)
    config = getattr(model, "config", model)
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"model is {str(model)[:60]!r}; give its name, its folder, the model or its config")
    return config.to_dict()


def main() -> int:
    """The other process: what is asked comes as JSON, and so does the answer."""
    with quiet():
        return exit_code("plan", answer, json.load(sys.stdin))


def answer(asked: dict) -> int:
    hf_config = config_from(asked["model"]) if isinstance(asked["model"], dict) else model_config(asked["model"])
    settings = asked["settings"]
    if unknown := settings.keys() - defaults(settings.get("algorithm") or "rloo"):
        raise ConfigError(f"{', '.join(sorted(unknown))}: no setting of TRL's trainer, nor of the launcher")
    if isinstance(asked["model"], str):
        settings |= settings_of_adapter(asked["model"], settings)
    where = asked["where"]
    where["images"] = tuple(map(tuple, where.get("images", ())))  # JSON has lists
    setup = from_settings(asked["prompt_tokens"], settings, hf_config, **where)
    calibration = load(asked["calibration"], setup.device) if asked["calibration"] else None
    (now,) = predict_all({"as it is": setup}, hf_config, lambda line: None, calibration)
    exceeds = asked["limit"] is not None and now.peak.total > asked["limit"]
    remedy = first_remedy(now, hf_config, asked["limit"], calibration) if exceeds else None
    remarked = tuple(remarks(setup, hf_config, calibration))
    print(json.dumps(asdict(Expected(tuple(now.phases), remedy, note(hf_config, setup.device), remarked))))
    return 0


def first_remedy(now: Prediction, hf_config, limit: int, calibration) -> Remedy | None:
    """Of the doctor's changes that make it fit alone, the first in its order: those that train the same come first."""
    trials = {lever.name: trial for lever in LEVERS if (trial := applied(lever, now.setup, hf_config))}
    try:
        found = {p.arm: p for p in predict_all(trials, hf_config, lambda line: None, calibration)}
    except ConfigError:  # not one of them can be predicted
        return None
    for lever in sorted(LEVERS, key=lambda lever: not lever.exact(now.setup)):
        if lever.name in found and (peak := found[lever.name].peak.total) <= limit:
            changed = changes(now.setup, found[lever.name].setup)
            return Remedy(lever.name, changed, lever.effect(now.setup), peak)
    return None


if __name__ == "__main__":
    sys.exit(main())
