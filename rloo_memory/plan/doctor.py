"""Say what filled the memory, and what would make it fit.

    rloo-memory doctor RUN_DIR --device-memory 23.5GiB
    rloo-memory doctor --model Qwen/Qwen3-8B --prompt 3000 --completion 512 --k 8 --device-memory 23.5GiB

RUN_DIR holds what `rloo_memory.hooks.memory_callback.MemoryCallback` wrote. First each change alone, in order of
effect. Then the changes that are needed, those that train the same before those that do not, without those that later
ones made unnecessary. They go into a YAML file for `rloo-memory launch`: your settings (those of the run, of --profile
or of the options), changed by nothing else.
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError, program
from rloo_memory.models import is_model
from rloo_memory.plan import speed
from rloo_memory.plan.accuracy.calibration import Calibration
from rloo_memory.plan.accuracy.measured import measured_errors
from rloo_memory.plan.accuracy.reserve import Room
from rloo_memory.plan.levers import LEVERS, SHARING, Lever, applied
from rloo_memory.plan.options import Asked, asked, check_writable, parser_of, quiet
from rloo_memory.plan.peaks import Prediction
from rloo_memory.plan.predict import predict_all
from rloo_memory.plan.records import Run, read_run
from rloo_memory.plan.remarks import remarks
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.trl_settings import by_batch, changes, with_changes
from rloo_memory.settings.profiles import dump_profile, find_profile, load_profile
from rloo_memory.sizes import GIB


@dataclass
class Search:
    """Looks for the changes that make a training, which is predicted as `start`, fit into a device. What was predicted
    is not predicted again; `say` is told each step."""

    start: Prediction
    hf_config: object
    room: Room
    say: Callable[[str], None]
    known: dict[Setup, Prediction]
    calibration: Calibration | None

    def predict(self, label: str, setup: Setup) -> Prediction:
        """Raises `ConfigError` for a setup that the model does not support."""
        if setup not in self.known:
            (self.known[setup],) = predict_all({label: setup}, self.hf_config, lambda line: None, self.calibration)
        return self.known[setup]

    def fits(self, prediction: Prediction) -> bool:
        return self.room.holds(prediction.phases)

    def needed(self) -> tuple[list[Lever], Prediction]:
        """The levers that are needed, and what is predicted with them, fitting or not. Sharing that makes it faster
        and trains the same is taken where all fits, too."""
        current, used = self.start, []
        if self.with_sharing:
            self.say(f"  {SHARING.name}: {gib(self.with_sharing)}, training {self.speed_of(self.with_sharing)}")
            if self.speeds_up():
                current, used = self.with_sharing, [SHARING]
        exact_first = sorted(LEVERS, key=lambda lever: not lever.exact(self.start.setup))
        for lever in exact_first * 2:  # what was of no use before another change can be of use after it
            # Halving can be done again; the others change nothing the second time
            while not self.fits(current) and (prediction := self.saving(lever, current)):
                current, used = prediction, [*used, lever]
        return (used, current) if not self.fits(current) else self.without_unneeded(used, current)

    def saving(self, lever: Lever, current: Prediction) -> Prediction | None:
        """What is predicted with one lever more, and said; None where it changes nothing, or hardly saves anything."""
        trial = applied(lever, current.setup, self.hf_config)
        if trial is None:
            return None
        try:
            prediction = self.predict(lever.name, trial)
        except ConfigError as error:
            self.say(f"  {lever.name}: {error}")
            return None
        useless = current.peak.total - prediction.peak.total < 0.01 * current.peak.total
        self.say(f"  {lever.name}: {gib(prediction)}{', of no use here' if useless else ''}")
        return None if useless else prediction

    @functools.cached_property
    def with_sharing(self) -> Prediction | None:
        """As `start`, but with prompts shared; None where they are already or cannot be, or where it then no longer
        fits."""
        trial = applied(SHARING, self.start.setup, self.hf_config)
        try:
            shared = trial and self.predict(SHARING.name, trial)
        except ConfigError:
            return None
        return None if shared and self.fits(self.start) and not self.fits(shared) else shared

    def speeds_up(self) -> bool:
        """Whether sharing is predicted to make it faster, and it trains the same."""
        shared = self.with_sharing
        return shared is not None and SHARING.exact(self.start.setup) and speed.is_faster(shared, [self.start])

    def effect(self, lever: Lever) -> str:
        """What a change does to a training, in words, and of sharing how fast it is then."""
        words, shared = lever.effect(self.start.setup), self.with_sharing if lever is SHARING else None
        return f"{words}; training {self.speed_of(shared)}" if shared else words

    def speed_of(self, shared: Prediction) -> str:
        return f"{speed.gain(shared, [self.start], 'train')} ({speed.LIMIT})"

    def without_unneeded(self, used: list[Lever], last: Prediction) -> tuple[list[Lever], Prediction]:
        """The same without the levers that later ones made unnecessary: those that train differently are left out
        first, of these the last one first. Sharing that makes it faster stays."""
        for lever in sorted(reversed(used), key=lambda lever: lever.exact(self.start.setup)):
            i = max(i for i, other in enumerate(used) if other is lever)
            rest = used[:i] + used[i + 1 :]
            setup = functools.reduce(lambda setup, other: other.apply(setup), rest, self.start.setup)
            if setup == last.setup:  # a later one replaced it
                used = rest
                continue
            if lever is SHARING and self.speeds_up():
                continue
            try:
                prediction = self.predict(f"without {lever.name}", setup)
            except ConfigError:
                continue
            if self.fits(prediction):
                self.say(f"  without {lever.name}: {gib(prediction)}, fits: left out")
                used, last = rest, prediction
        return used, last


def gib(prediction: Prediction) -> str:
    return f"{prediction.peak.total / GIB:.2f} GiB"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of("doctor", __doc__, device_memory="; default: the device of the run")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run, instead of the options that describe one")
    parser.add_argument("--output", type=Path, default=Path("fits.yaml"), help="where the settings that fit go")
    return parser.parse_args(argv)


LEARNING_RATE = "learning_rate is not set: TRL's 1e-6 is for all weights, adapters take more, such as 1e-5"


@program("doctor")
@quiet()
def main(argv: list[str] | None) -> int:
    args = parse_args(argv)
    question, old = read(args)
    hf_config, settings, setup = question.hf_config, question.settings, question.setup
    room, calibration = question.room, question.calibration
    say = functools.partial(print, flush=True)
    (now,), predictions = predict_all({"as it is": setup}, hf_config, say, calibration), {}
    if not room.holds(now.phases):
        trials = {lever.name: trial for lever in LEVERS if (trial := applied(lever, setup, hf_config))}
        say(f"predicting {len(trials)} changes")
        predictions = {p.arm: p for p in predict_all(trials, hf_config, say, calibration)}
    search = Search(now, hf_config, room, say, {p.setup: p for p in (now, *predictions.values())}, calibration)
    explain(now, old.peaks if old else {}, room)
    for words in remarks(setup, hf_config, calibration):
        print(words)
    if reasons := by_batch(settings, hf_config):
        print(
            f"{', '.join(reasons)}: an update depends on which completions share a micro-batch, in untouched TRL too, "
            "so with other micro-batches it trains differently"
        )
    if predictions:
        print_each_alone(predictions, search)

    print(f"\nuntil it fits in {room.size / GIB:.2f} GiB:")
    used, last = search.needed()
    if search.fits(now):
        print(f"  nothing is needed{'; prefix_sharing takes less time' if used else ''}")
    if not search.fits(last):
        missing = (room.needed(last.phases) - room.size) / GIB
        print(
            f"It does not fit: {gib(last)} with every lever, {last.peak.phase} phase. "
            f"{missing:.2f} GiB are missing: a smaller model, a shorter prompt or more "
            "devices are left. No settings are written."
        )
        return 1
    write_settings(args.output, settings, old, used, last, search)
    conclude(args, settings, setup, used, last, room)
    return 0


def read(args: argparse.Namespace) -> tuple[Asked, Run | None]:
    """What is asked for, of a run if the options name one. Raises `ConfigError`."""
    old = profile = None
    if args.run and args.profile:
        raise ConfigError(f"{args.run} is a run with settings of its own: leave out --profile {args.profile}")
    if args.run and args.model:
        raise ConfigError(f"{args.run} is a run with a model of its own: leave out --model {args.model}")
    if args.run:
        old = read_run(args.run)
        if old.prompt_tokens is None and args.prompt_tokens is None:
            raise ConfigError(
                f"{args.run}/memory.json has no prompt length, as where vLLM or continuous batching generates: add "
                "--prompt N"
            )
    elif args.profile:
        profile = load_profile(args.profile)
        if args.output.resolve() == find_profile(args.profile).resolve():
            raise ConfigError(f"--output {args.output} is the profile itself; name another file")
    elif not args.model:
        raise ConfigError("nothing to look at: name a run folder, or --model, --prompt and --device-memory")
    check_writable(args.output)
    question = asked(args, profile, old)
    if question.room is None:
        raise ConfigError("no device memory: --device-memory, such as 24GiB")
    return question, old


def print_each_alone(predictions: dict[str, Prediction], search: Search) -> None:
    """Predictions with one lever, by its name: the smallest peak first."""
    print("\neach change alone, GiB:")
    levers = {lever.name: lever for lever in LEVERS}
    for name, prediction in sorted(predictions.items(), key=lambda pair: pair[1].peak.total):
        saved = search.start.peak.total - prediction.peak.total
        effect = search.effect(levers[name])
        if host := prediction.most_on_host.host:
            effect += f"; {host / GIB:.2f} GiB wait on the host"
        print(f"  {prediction.peak.total / GIB:8.2f}  {-saved / GIB:+8.2f}  {name:31} {effect}")


def needs_learning_rate(settings: dict, last: Prediction) -> bool:
    return bool(last.setup.lora_rank) and "learning_rate" not in settings


def write_settings(
    path: Path, settings: dict, old: Run | None, used: list[Lever], last: Prediction, search: Search
) -> None:
    """The user's settings with the changes of the levers, and the longest prompt that this is for."""
    setup = search.start.setup
    changed = changes(setup, last.setup)
    lines = [
        f"Peak {gib(last)} predicted, {last.peak.phase} phase; limit {search.room.size / GIB:.2f} GiB.",
        f"max_prompt_tokens: {setup.prompt_tokens}: what was planned for; the launcher refuses longer prompts.",
    ]
    lines += [f"{lever.name}: {search.effect(lever)}" for lever in dict.fromkeys(used)]
    new = {name: value for name, value in changed.items() if settings.get(name) != value}
    lines += [f"  {name} is removed" if value is None else f"  {name}: {value}" for name, value in new.items()]
    if needs_learning_rate(settings, last):
        lines.append(LEARNING_RATE)
    if old and old.missing:
        lines.append(f"The run did not record {', '.join(old.missing)}: add yours, else the defaults are taken.")
    if path.exists():
        print(f"{path} is replaced")
    written = with_changes(settings, changed) | {"max_prompt_tokens": setup.prompt_tokens}
    dump_profile(path, written, lines)


def conclude(
    args: argparse.Namespace, settings: dict, setup: Setup, used: list[Lever], last: Prediction, room: Room
) -> None:
    """What it comes to, and the command that trains with it."""
    errors, path = measured_errors(), args.output.resolve()
    same = "Trains the same as before. " if used and all(lever.exact(setup) for lever in used) else ""
    verdict = "just fits, by less than the error" if errors.may_exceed(last.peak.total, room.size) else "fits"
    print(f"{verdict}: {gib(last)}. {same}Settings, with prompts to {setup.prompt_tokens} tokens: {path}")
    print(f"  {errors.in_words(last.peak.total)}")
    if host := last.most_on_host.host:
        print(f"  {host / GIB:.2f} GiB wait on the host at most ({last.most_on_host.phase})")
    own = "" if settings.get("dataset_name") else " --dataset_name PROMPTS.jsonl"
    rewarded = settings.get("reward_funcs") or settings.get("reward_model_name_or_path")
    own += "" if rewarded else " --reward_funcs MODULE:FUNCTION"
    command = "rloo-memory launch"
    if setup.is_distributed:
        devices = shlex.quote(str(args.accelerate or "ACCELERATE.yaml"))
        command = f"accelerate launch --config_file {devices} -m rloo_memory.launch"
    model = "" if is_model(settings.get("model_name_or_path") or "") else "MODEL_PATH=/path/to/model "
    print(f"  {model}{command} {shlex.quote(str(path))}{own}")
    if needs_learning_rate(settings, last):
        print(f"  {LEARNING_RATE}")
    rows, k = last.setup.per_device_train_batch_size, last.setup.num_generations
    if last.setup.device == "cuda" and last.setup.prefix_sharing and rows < k:
        print(
            f"  on CUDA more than {rows} completions a micro-batch may be faster while the model is small: each "
            "micro-batch starts its kernels anew (docs/measuring.md)"
        )
    print("  PYTORCH_ALLOC_CONF=expandable_segments:True keeps fragmentation low on CUDA; the launcher sets it")


def explain(now: Prediction, measured: dict[str, int], room: Room) -> None:
    """Which phase and which kind of tensor peaked."""
    phase = now.peak
    if measured:
        name = max(measured, key=measured.get)
        phase = next((p for p in now.phases if p.phase == name), phase)
        what = " (the whole process: Python, torch and what it keeps come on top)" if now.setup.device == "cpu" else ""
        print(
            f"measured: {measured[name] / GIB:.2f} GiB{what}, {name} phase; predicted for it "
            f"{phase.total / GIB:.2f} GiB"
        )
    needed = room.needed(now.phases)
    wasted = f"{needed / GIB:.2f} GiB with what the allocator wastes, " if needed > now.peak.total else ""
    print(f"predicted peak {gib(now)}, {now.peak.phase} phase; {wasted}limit {room.size / GIB:.2f} GiB")
    print(f"the limit: {room.device / GIB:.2f} GiB less {room.taken}")
    print(f"{phase.phase}: {phase.parts()}")
    if phase.kinds.get("parameters", 0) > room.size:
        print(f"the weights alone exceed the limit by {(phase.kinds['parameters'] - room.size) / GIB:.2f} GiB")


if __name__ == "__main__":
    sys.exit(main())
