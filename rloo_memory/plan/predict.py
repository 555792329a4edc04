"""The peak of each phase of a training, predicted: of one setup, of several at once, and the largest that fits.

from rloo_memory.plan.predict import predict
from rloo_memory.plan.setups import Setup
from rloo_memory.models import named_config

setup = Setup(prompt_tokens=3000, max_completion_length=512, lora_rank=16).arm("shared")
print(predict("shared", setup, named_config("Qwen/Qwen3-8B")).peak)
"""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from rloo_memory.errors import ConfigError
from rloo_memory.installed_trl import need_trl
from rloo_memory.plan.images import PromptImages
from rloo_memory.plan.peaks import VLLM, PredictedPeak, Prediction
from rloo_memory.plan.ranges import MOST_K
from rloo_memory.plan.setups import LARGEST, MOST_TOKENS, Setup, check, positions_of
from rloo_memory.sizes import GIB


def predict(arm: str, setup: Setup, hf_config, calibration=None) -> Prediction:
    """The peaks of one setup, corrected by an `accuracy.calibration.Calibration` if there is one; `arm` is its label.
    Raises `ConfigError` before anything runs."""
    check(setup, hf_config)
    need_trl()
    from rloo_memory.plan.scale_up.extrapolate import phase_peaks

    return prediction(arm, setup, phase_peaks(setup, hf_config), calibration)


def prediction(arm: str, setup: Setup, peaks: list[PredictedPeak], calibration) -> Prediction:
    """From simulated peaks: as a calibration corrects them, with vLLM's share of the device beside them. Asleep, at
    TRL's level 2, it keeps no weights and no cache."""
    peaks = calibration.corrected(peaks) if calibration else peaks
    if share := setup.vllm_bytes:
        asleep = {"score", "train", "optimizer"} if setup.vllm_enable_sleep_mode else ()
        peaks = [peak if peak.phase in asleep else peak.plus(VLLM, share) for peak in peaks]
    return Prediction(arm, setup, peaks)


def predict_all(setups: dict[str, Setup], hf_config, say, calibration=None) -> list[Prediction]:
    """The same for several, by label, at the same time in processes of their own. What no trainer accepts or the model
    does not support is said and left out; raises `ConfigError` if nothing is left. `say` is told how far it is and
    about how long it takes."""
    refused = {}
    for label, setup in setups.items():
        try:
            check(setup, hf_config)
        except ConfigError as error:
            refused[label] = error
            say(f"  {label}: {error}")
    setups = {label: setup for label, setup in setups.items() if label not in refused}
    if refused and not setups:
        raise next(iter(refused.values()))
    if not setups:
        return []
    need_trl()
    import torch
    import trl.trainer.rloo_trainer  # noqa: F401  once, not in each process

    from rloo_memory.plan.scale_up import extrapolate

    tasks = {label: extrapolate.simulations(setup, hf_config) for label, setup in setups.items()}
    number, start, found = sum(map(len, tasks.values())), time.monotonic(), {}
    # Of the threads that this one has computed with, a forked process has none, and would wait for them
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(min(number, os.cpu_count() or 1), multiprocessing.get_context("fork"), **alone) as pool:
        # Those that take longest, of shared prompts, come last: they are begun first
        futures = {
            label: [pool.submit(extrapolate.simulate, *task) for task in reversed(tasks[label])]
            for label in reversed(tasks)
        }
        for place, (label, each) in enumerate(futures.items(), 1):
            line = f"  {place} of {len(setups)}: {label}"
            try:
                about = setups[label], hf_config, tasks[label], [future.result() for future in reversed(each)]
                predicted = prediction(label, setups[label], extrapolate.combine(*about), calibration)
                found[label] = replace(predicted, work=extrapolate.work_of(*about))
            except ConfigError as error:
                refused[label], line = error, f"{line}: {error}"
            finished = sum(future.done() for each in futures.values() for future in each)
            remain = (time.monotonic() - start) * (number - finished) / finished
            say(f"{line}; about {remain:.0f} s left" if remain >= 1 else line)
    if not found:
        raise next(iter(refused.values()))
    return [found[label] for label in setups if label in found]


def largest_that_fits(arm: str, setup: Setup, hf_config, what: str, room, say=print, calibration=None) -> int:
    """The largest k, prompt or completion ("k", "prompt", "completion") that a `accuracy.reserve.Room` holds; 0
    if the smallest does not fit. Peaks grow along almost straight lines, so each guess is where the last two would
    meet the limit."""
    name, (least, most) = LARGEST[what], ends_of(what, setup, hf_config)
    known: dict[int, int] = {}
    limit = room.size

    def peak(value: int) -> int:
        if value not in known:
            trial = setup.with_k(value) if what == "k" else replace(setup, **{name: value})
            known[value] = room.needed(predict(arm, trial.arm(arm), hf_config, calibration).phases)
            say(f"  {what} {value}: {known[value] / GIB:.2f} GiB")
        return known[value]

    low, high = least, most + 1  # `low` fits, `high` does not
    if peak(least) > limit:
        return 0
    guess, width = min(max(getattr(setup, name), least + 1), most), high - low
    while high - low > max(1, low // 100):  # to one percent
        if peak(guess) <= limit:
            low = guess
        else:
            high = guess
        width, before = high - low, width
        below, above = sorted(known, key=lambda value: abs(known[value] - limit))[:2]
        slope = (known[above] - known[below]) / (above - below)
        meets = int(below + (limit - known[below]) / slope) if slope > 0 else 2 * low
        guess = min(max(meets, low + 1, low + (high - low) // 50), high - 1, 4 * low)
        if guess in known or high in known and width > before / 2:  # an odd k can take less than the even one below it
            guess = (low + high) // 2
    return low


def ends_of(what: str, setup: Setup, hf_config) -> tuple[int, int]:
    """The least and the most that are looked at."""
    shortest = PromptImages.of(setup.images, hf_config).tokens + 1 if setup.images else 16
    prompts = setup.generation_rows // setup.num_generations
    length = setup.prompt_tokens + setup.max_completion_length
    positions = max(length, positions_of(hf_config) or MOST_TOKENS // setup.generation_rows)
    least, most = {
        "k": (2, max(2, min(MOST_K, MOST_TOKENS // (prompts * length)))),
        "prompt": (shortest, positions - setup.max_completion_length),
        "completion": (16, positions - setup.prompt_tokens),
    }[what]
    return min(least, most), most
