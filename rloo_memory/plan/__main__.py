"""Predict the peak memory of RLOO or GRPO training, phase by phase, without a GPU and without weights.

    rloo-memory plan --model Qwen/Qwen3-8B --prompt 3000 --completion 512 --k 8 --device-memory 79.1GiB
    rloo-memory plan --model ./my-model --profile single_gpu_24gb --prompt 3000 --largest k

Compares today's trainer with one pass (stock, TRL 1.15 and newer), with one completion a pass (stock-accumulate), and
prefix sharing (shared); with --tokens-per-forward also whole rows within a token budget (stock-tokens, which only the
planner has). --arms stock-1.9 is TRL 1.0 to 1.9, stock-1.13 is 1.10 to 1.13: they keep the logits of all completions,
and so does stock-1.14.
Sizes are what torch allocates on the device; the CUDA context and the allocator's fragmentation come on top
(`--reserve`). --calibration RUN_DIR corrects each phase by what a run of the launcher measured.
"""

import argparse
import functools
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from rloo_memory.errors import ConfigError, choose, program
from rloo_memory.installed_trl import versions_here
from rloo_memory.plan import smallest, speed
from rloo_memory.plan.accuracy.calibration import Calibration
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.images import PromptImages
from rloo_memory.plan.options import asked, check_writable, parser_of, quiet
from rloo_memory.plan.peaks import Prediction
from rloo_memory.plan.predict import largest_that_fits, predict_all
from rloo_memory.plan.records import read_run
from rloo_memory.plan.remarks import remarks
from rloo_memory.plan.setups import ARM_NAMES, LARGEST, Setup
from rloo_memory.plan.trl_settings import from_settings
from rloo_memory.settings.profiles import load_profile
from rloo_memory.sizes import GIB


def table(predictions: list[Prediction], room: Room | None) -> str:
    """Peaks by phase in GiB, one line an arm, and what the highest is made of."""
    phases = [phase.phase for phase in predictions[0].phases]
    lines = [f"{'peak allocated, GiB':22}" + "".join(f"{name:>11}" for name in phases) + "  fits"]
    for prediction in predictions:
        peak = prediction.peak
        cells = "".join(f"{phase.total / GIB:>10.2f}{'*' if phase is peak else ' '}" for phase in prediction.phases)
        lines.append(f"{prediction.arm:22}{cells}  {fits(prediction, room)}".rstrip())
    lines.append("")
    for prediction in predictions:
        peak = prediction.peak
        lines.append(f"{prediction.arm}, {peak.phase}: {peak.parts()}")
        if most := prediction.most_on_host.host:
            lines.append(f"{prediction.arm}, on the host at most: {most / GIB:.2f} ({prediction.most_on_host.phase})")
    return "\n".join(lines)


def fits(prediction: Prediction, room: Room | None) -> str:
    """The verdict. "just": the tensors fit, but not with what the allocator wastes, or with the highest that the peak
    stands for."""
    if room is None:
        return ""
    if (short := prediction.peak.total - room.size) > 0:
        return f"short by {max(short / GIB, 0.01):.2f} GiB"
    sure = room.holds(prediction.phases) and not measured_errors().may_exceed(prediction.peak.total, room.size)
    return "yes" if sure else "just"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of("plan", __doc__, device_memory=": says what fits")
    parser.add_argument("--arms", help=f"some of {', '.join(ARM_NAMES)}; default: those of today")
    parser.add_argument("--largest", choices=tuple(LARGEST), help="find the largest that fits the device memory")
    parser.add_argument("--cards", action="store_true", help="find the smallest that hold it, also 2 to 8 with FSDP2")
    parser.add_argument(
        "--completion-mean", type=int, help="tokens of completions on average, where --completion is the longest"
    )
    parser.add_argument("--json", type=Path, help="write the prediction to this file")
    return parser.parse_args(argv)


def chosen_arms(names: str | None, setup: Setup) -> list[str]:
    """The arms to compare, each once. Raises `ConfigError`."""
    if names is None:
        budget = ("stock-tokens",) if setup.tokens_per_forward else ()
        return ["stock", "stock-accumulate", *budget, "shared"]
    arms = list(dict.fromkeys(choose("arm", name.strip(), ARM_NAMES) for name in names.split(",")))
    if "stock-tokens" in arms and not setup.tokens_per_forward:
        raise ConfigError("arm stock-tokens is a token budget: add --tokens-per-forward N")
    return arms


def timed_predictions(predictions: list[Prediction], completion_mean: int | None, hf_config, say) -> list[Prediction]:
    """Those whose work tells the time: where completions differ in length, passes do not compute the padding of whole
    rows to the longest. Raises `ConfigError` for a mean that they cannot have."""
    if completion_mean is None:
        return predictions
    setups = {
        p.arm: replace(p.setup, max_completion_length=completion_mean, padded_to=p.setup.max_completion_length)
        for p in predictions
        if p.setup.uses_passes
    }
    packed = {p.arm: p for p in predict_all(setups, hf_config, say)}
    return [packed.get(p.arm, p) for p in predictions]


@program("plan")
@quiet()
def main(argv: list[str] | None) -> int:
    args, start = parse_args(argv), time.time()
    if args.largest and args.device_memory is None:
        raise ConfigError("--largest needs --device-memory")
    if args.json:
        check_writable(args.json)
    question = asked(args, load_profile(args.profile) if args.profile else None)
    arms = chosen_arms(args.arms, question.setup)
    model, hf_config, setup = question.model, question.hf_config, question.setup
    room, calibration = question.room, question.calibration
    if args.cards:
        smallest.check_cards(setup)
    longest = setup.max_completion_length
    if args.completion_mean is not None and not 1 <= args.completion_mean <= longest:
        raise ConfigError(f"--completion-mean {args.completion_mean}: between 1 and --completion, {longest}")
    say = functools.partial(print, file=sys.stderr, flush=True)
    setups = {arm: setup.arm(arm) for arm in arms}
    predictions = predict_all(setups, hf_config, say, calibration)
    timed = timed_predictions(predictions, args.completion_mean, hf_config, say)
    parameters = predictions[0].phases[0].kinds.get("parameters", 0)
    print(
        f"{model}: {setup.in_words}; prompt {setup.prompt_tokens}, completion {setup.max_completion_length}, "
        f"k {setup.num_generations}, {setup.generation_rows} completions generated together, "
        f"{setup.per_device_train_batch_size} a micro-batch, weights on a device {parameters / GIB:.2f} GiB"
    )
    if not setup.lora_rank and setup.dtype != "float32" and not setup.keeps_float32:
        print(
            f"{setup.dtype} weights: most updates of TRL's learning rate, 1e-6, round to nothing; float32 keeps them"
        )
    if setup.images:
        tokens = " + ".join(f"{length:,}" for length in PromptImages.of(setup.images, hf_config).lengths)
        print(f"{tokens} of the prompt's tokens are its image{'s' if len(setup.images) > 1 else ''}")
    print(table(predictions, room))
    if room is not None:
        taken = f"{args.device_memory} less {room.taken}"
        if parameters > room.size:
            print(f"The weights alone exceed {taken} by {(parameters - room.size) / GIB:.2f} GiB.")
        print(f"fits: within {taken}; just: by less than the error, or than the allocator's part")
    print(measured_errors().in_words(max(prediction.peak.total for prediction in predictions)))
    for words in speed.in_words(timed):
        print(words)
    for words in smallest.in_words(predictions, hf_config, say) if args.cards else ():
        print(words)
    for words in seconds_beside(args.calibration, calibration, timed, say) if calibration else ():
        print(words)
    for words in remarks(setup, hf_config, calibration):
        print(words)
    for arm in [prediction.arm for prediction in predictions] if args.largest else ():
        print(f"{arm}: looking for the largest {args.largest}")
        value = largest_that_fits(arm, setup, hf_config, args.largest, room, calibration=calibration)
        print(f"{arm}: largest {args.largest} {value or 'none'}")
    if args.json:
        args.json.write_text(json.dumps(result_of(model, room, predictions), indent=1) + "\n")
        print(args.json)
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    return 0


def seconds_beside(folder: Path, calibration: Calibration, timed: list[Prediction], say) -> list[str]:
    """Seconds of each way, from those that a calibration's run in this folder took."""
    old = read_run(folder)
    of_run = {"the calibration's run": from_settings(old.prompt_tokens, old.settings, old.hf_config, **old.where)}
    (measured,) = predict_all(of_run, old.hf_config, say)
    return speed.seconds_in_words(timed, measured, calibration.seconds)


def result_of(model: str, room: Room | None, predictions: list[Prediction]) -> dict:
    """What --json writes. Sizes in bytes; `device_memory_bytes` is less the reserve."""
    return {
        "model": model,
        "versions": versions_here(),
        "device_memory_bytes": room and room.size,
        "measured_over_predicted": [measured_errors().low, measured_errors().high],
        "predictions": [
            {"arm": p.arm, "setup": asdict(p.setup), "phases": [asdict(phase) for phase in p.phases]}
            for p in predictions
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
