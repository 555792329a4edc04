"""Before anything loads: the predicted peak of each phase, and a refusal if it is more than the device has."""

import os
import shlex

from rloo_memory.device import available_bytes
from rloo_memory.errors import ConfigError
from rloo_memory.launch.dataset import Lengths
from rloo_memory.plan import ask
from rloo_memory.plan.accuracy.calibration import load
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.accuracy.reserve import EXPANDABLE, FIXED, OUTSIDE, Room
from rloo_memory.plan.peaks import CORRECTION, PredictedPeak
from rloo_memory.plan.simulation.recurrent import kernels_here
from rloo_memory.settings.arguments import LaunchArguments
from rloo_memory.sizes import GIB


def say(line: str) -> None:
    print(f"memory  {line}", flush=True)


def peaks_that_fit(
    profile: str, launch: LaunchArguments, config, model, source: str, hf_config, lengths: Lengths
) -> dict:
    """The peak of each phase, bytes; nothing where it cannot be predicted, which is said. Raises `ConfigError` with
    the first remedy where the training does not fit and nobody said `anyway`."""
    say("predicting the peak of each phase (--predict_memory false leaves it out)")
    settings = ask.settings_of(model) | ask.settings_of(launch) | ask.settings_of(config)
    calibration, room = launch.calibration, room_here(config)
    # Of another revision, or with values of the user's, the config is not the one that `source` stands for
    planned = hf_config if config.model_init_kwargs else source
    if calibration:
        load(calibration, config.device.type)  # one that cannot be used is refused
    try:
        where = {"images": lengths.images, "calibration": calibration, **devices_here(config)}
        expected = ask.predict(settings, planned, lengths.longest, **where)
    except ConfigError as error:
        say(f"not predicted: {error}")
        return {}
    peak, limit = expected.peak, room.size
    phases = ", ".join(f"{phase.phase} {phase.total / GIB:.2f}" for phase in expected.phases)
    free = f"{limit / GIB:.2f} that are free"
    say(f"predicted peak {peak.total / GIB:.2f} GiB of {free}, in phase {peak.phase} ({phases})")
    for line in (*expected.remarks, *doubts(expected, room)):
        say(line)
    uncertain = expected.note and kernels_here()
    if peak.total > limit and uncertain:
        say(f"it may not fit; not refused, because {uncertain} can be here for that")
    elif peak.total > limit and not launch.anyway:
        say("looking for a change that makes it fit: a minute or some")
        remedy = ask.predict(settings, planned, lengths.longest, limit=limit, **where).remedy
        doctor = doctor_of(profile, source, lengths, config, calibration)
        raise ConfigError(refusal(peak, limit, remedy, settings, doctor))
    return {phase.phase: phase.total - phase.kinds.get(CORRECTION, 0) for phase in expected.phases}


def doubts(expected: ask.Expected, room: Room) -> list[str]:
    """What to say where it is not sure that a training fits whose tensors do."""
    peak = expected.peak.total
    if measured_errors().may_exceed(peak, room.size):
        return [f"it may not fit: {measured_errors().in_words(peak)}"]
    if not room.holds(expected.phases):
        needed = f"{room.needed(expected.phases) / GIB:.2f} GiB"
        return [f"it may not fit: with what the allocator wastes, torch may reserve {needed}"]
    return []


def doctor_of(profile: str, source: str, lengths: Lengths, config, calibration: str | None) -> str:
    """The doctor's command for this training."""
    words = ["rloo-memory", "doctor", "--profile", profile, "--model", source, "--prompt", str(lengths.longest)]
    for width, height in lengths.images:
        words += ["--image", f"{width}x{height}"]
    words += ["--device-memory", f"{free_here(config) / GIB:.1f}GiB"]
    words += ["--device", "cpu"] if config.device.type == "cpu" else []
    return shlex.join(words + (["--calibration", calibration] if calibration else []))


def room_here(config) -> Room:
    """What the device of a process has free for tensors."""
    free = free_here(config)
    if config.device.type != "cuda":
        return Room(free)
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    return Room(free - OUTSIDE, EXPANDABLE if expandable else FIXED)


def free_here(config) -> int:
    """Bytes that a process has for itself: those of its device, or its part of the host's."""
    free = available_bytes(str(config.device))
    return free if config.device.type == "cuda" else free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def refusal(peak: PredictedPeak, limit: int, remedy: ask.Remedy | None, settings: dict, doctor: str) -> str:
    """One line: what is predicted, what there is, and the doctor's first remedy as settings."""
    line = f"predicted peak {peak.total / GIB:.2f} GiB in phase {peak.phase} exceeds the {limit / GIB:.2f} GiB that "
    line += f"are free ({peak.parts()}); "
    if remedy is None:
        line += f"no single change makes it fit: {doctor} finds several for the profile as it is written"
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
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def devices_here(config) -> dict:
    """Fields of `Setup` from how accelerate started this. Raises `ConfigError` for what the planner does not know."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ConfigError("under DeepSpeed the launcher predicts nothing; rloo-memory plan --accelerate FILE does")
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded and os.environ.get("FSDP_VERSION") != "2":
        raise ConfigError("the planner's formula is for FSDP2")
    import torch

    on_gpu = config.device.type == "cuda"  # vLLM's share is one of all that is there
    mixed = "no" if config.bf16 or config.fp16 else os.environ.get("ACCELERATE_MIXED_PRECISION")  # of its file
    return {
        "device": config.device.type,
        "device_memory": torch.cuda.get_device_properties(config.device).total_memory if on_gpu else 0,
        "num_devices": config.world_size,
        **({mixed: True} if mixed in ("bf16", "fp16") else {}),
        "fully_sharded": sharded,
        "offload_parameters": sharded and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
    }
