"""Before anything loads: the predicted peak of each phase, and a refusal if it is more than the device has."""

import os
import time

from experiments.config import GIB, ConfigError, parse_bytes
from experiments.device import available_bytes
from experiments.plan import ask
from experiments.plan.errors import measured_errors
from experiments.plan.options import RESERVE
from experiments.plan.predict import PredictedPeak
from experiments.settings.arguments import LaunchArguments


def predicted_peaks(
    profile: str, launch: LaunchArguments, config, model, source: str, prompt_tokens: int
) -> dict[str, int]:
    """The peak of each phase, bytes; {} where it cannot be predicted, which is said.

    The first process predicts, and all of them hear what it found. Raises `ConfigError` with the first remedy where
    the training does not fit and nobody said `anyway`, in the first process; the others end without a word.
    """
    if not launch.predict_memory:
        return {}
    found = [None]
    if config.process_index == 0:
        try:
            found = [peaks_that_fit(profile, launch, config, model, source, prompt_tokens)]
        except ConfigError as error:
            found = [error]
    if config.world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(found)
    if isinstance(found[0], ConfigError):
        raise found[0] if config.process_index == 0 else SystemExit(2)
    return found[0]


def peaks_that_fit(profile: str, launch: LaunchArguments, config, model, source: str, prompt_tokens: int):
    began, device = time.monotonic(), config.device.type
    print("memory  predicting the peak of each phase (--predict_memory false leaves it out)", flush=True)
    settings = ask.settings_of(model) | ask.settings_of(launch) | ask.settings_of(config)
    limit, reserve = available_bytes(str(config.device)), parse_bytes(RESERVE)
    limit = int(limit - reserve if device == "cuda" else limit / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    try:
        where = {"device": device, **devices_here(config)}
        expected = ask.predict(settings, source, prompt_tokens, **where)
    except ConfigError as error:
        print(f"memory  not predicted: {error}", flush=True)
        return {}
    peak = expected.peak
    phases = ", ".join(f"{phase.phase} {phase.total / GIB:.2f}" for phase in expected.phases)
    engine = "; what vLLM keeps comes on top" if config.use_vllm else ""
    print(
        f"memory  predicted peak {peak.total / GIB:.2f} GiB of {limit / GIB:.2f} that are free, in phase {peak.phase} "
        f"({phases}{engine}; {time.monotonic() - began:.0f} s)",
        flush=True,
    )
    errors = measured_errors()
    if errors and errors.range_of(peak.total)[1] > limit:
        print(f"memory  it may not fit: {errors.in_words(peak.total)}", flush=True)
    if peak.total > limit and not launch.anyway:
        print("memory  looking for a change that makes it fit: a minute or some", flush=True)
        remedy = ask.predict(settings, source, prompt_tokens, limit=limit, **where).remedy
        doctor = f"python -m experiments.plan.doctor --profile {profile} --model {source} --prompt {prompt_tokens}"
        doctor += f" --device-memory {(limit + reserve) / GIB:.1f}GiB"
        raise ConfigError(refusal(peak, limit, remedy, settings, doctor))
    return {phase.phase: phase.total for phase in expected.phases}


def refusal(peak: PredictedPeak, limit: int, remedy: ask.Remedy | None, settings: dict, doctor: str) -> str:
    """One line: what is predicted, what there is, and the doctor's first remedy as settings."""
    line = f"predicted peak {peak.total / GIB:.2f} GiB in phase {peak.phase} exceeds the {limit / GIB:.2f} GiB that "
    line += f"are free ({peak.parts()}); "
    if remedy is None:
        line += f"no single change makes it fit: {doctor} finds several"
    else:
        given = {name: value for name, value in remedy.settings.items() if value is not None}
        words = [f"--{name} {in_words(value)}" for name, value in given.items()]
        # TRL makes the generation batch of the steps itself
        taken = set(remedy.settings) - set(given) - {"generation_batch_size"}
        words += [f"no {name}" for name in sorted(taken) if settings.get(name) is not None]
        line += f"{', '.join(words)} needs {remedy.peak / GIB:.2f} GiB ({remedy.effect})"
    return f"{line}; --anyway trains all the same"


def in_words(value) -> str:
    """A setting's value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def devices_here(config) -> dict:
    """Fields of `Setup` from how accelerate started this. Raises `ConfigError` for what the planner does not know."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ConfigError("the planner has no formula for DeepSpeed")
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded and os.environ.get("FSDP_VERSION") != "2":
        raise ConfigError("the planner's formula is for FSDP2")
    return {
        "num_devices": config.world_size,
        "fully_sharded": sharded,
        "offload_parameters": sharded and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
    }
