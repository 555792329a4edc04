"""How many times faster scoring and training get where prompts are shared, and seconds beside a measured run.

A simulation tells what each operation computes and moves (`rloo_memory.plan.simulation.work`), and a device is fast at
one or the other. The ratio of two ways hardly depends on which, so it is given without knowing the device. Seconds are
not: they are those of a measured run on it, times the ratio to what that run computed.
"""

from rloo_memory.plan.peaks import Prediction
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.work import Speed, seconds

PHASES = {"score": "scoring", "train": "training"}
BANDWIDTH = 1e12  # bytes a second; a ratio depends on operations for each byte alone
# Operations a second for each byte a second: in half precision of GPUs from V100 and A100 (140, 150) to L4 (400), in
# float32, where matrix units are not used, of GPUs, and of CPUs
BALANCES = {"half": (100, 400), "float32": (8, 80), "cpu": (4, 40)}
# Of what an H100 reaches, and seconds that an operation takes to start from Python: the fewest and the most
H100 = Speed(flops=5e14, bytes=2.5e12)
STARTS = (4e-6, 20e-6)
# A ratio is a limit, and published ones are lower by up to so much: pull requests 4368 of verl, 6871 of Unsloth
LOWER = 1.4
LIMIT = "a limit: published speed-ups (verl 4368, Unsloth 6871) are 1.3 to 1.4 times lower"


def balances(setup: Setup) -> tuple[int, int]:
    if setup.device == "cpu":
        return BALANCES["cpu"]
    return BALANCES["half" if setup.autocast or setup.dtype != "float32" else "float32"]


def in_words(predictions: list[Prediction]) -> list[str]:
    """A line for each way that shares prompts, beside the whole rows that take least time, and what binds it else."""
    whole = [p for p in predictions if p.arm.startswith("stock")]
    lines = []
    for shared in predictions if whole else ():
        if shared.setup.prefix_sharing:
            low, high = balances(shared.setup)
            gains = [f"{word} {gain(shared, whole, phase)}" for phase, word in PHASES.items() if phase in shared.work]
            kind = "CPUs" if shared.setup.device == "cpu" else "GPUs"
            lines.append(
                f"{shared.arm}, beside TRL's faster way: {', '.join(gains)} (by what is computed and moved, on {kind} "
                f"of {low} to {high} operations a byte)"
            )
            if shared.setup.as_run is not shared.setup:
                lines.append("  Its prompts are so short that rows are scored and trained whole.")
            if min(ratios(shared, whole, "train")) < 1:
                lines.append("  Each of its passes reads all weights: more completions a micro-batch take fewer.")
            lines += bound_by_starts(shared, whole)
    return [*lines, f"  Each is {LIMIT}."] if lines else []


def gain(shared: Prediction, whole: list[Prediction], phase: str) -> str:
    """What devices make of it."""
    return times(ratios(shared, whole, phase))


def times(found: list[float]) -> str:
    """Ratios of the time before to the time after, the smaller first, in words: one below 1 is slower."""
    if round(found[0], 1) >= 1:
        words = "is {} times faster"
    else:
        found, words = [1 / ratio for ratio in reversed(found)], "takes {} times as long"
    return words.format(" to ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in found)))


def is_faster(shared: Prediction, whole: list[Prediction]) -> bool:
    """Whether scoring and training take less time together, even if as much is lost as where others measured it."""
    return min(ratios(shared, whole, *PHASES)) >= LOWER


def ratios(shared: Prediction, whole: list[Prediction], *phases: str) -> list[float]:
    """How many times faster it is on devices of either balance, the smaller first."""
    found = []
    for balance in balances(shared.setup):
        speed = Speed(balance * BANDWIDTH, BANDWIDTH)
        done = [phase for phase in phases if phase in shared.work]  # GRPO may score nothing
        taken = [sum(seconds(each.work[phase], speed) for phase in done) for each in (shared, *whole)]
        found.append(min(taken[1:]) / taken[0])
    return sorted(found)


def bound_by_starts(shared: Prediction, whole: list[Prediction]) -> list[str]:
    """A word where a fast GPU computes less long than Python takes to start the operations."""
    if shared.setup.device == "cpu":
        return []

    def train(prediction: Prediction, start: float) -> float:
        work = prediction.work["train"]
        return max(seconds(work, H100), work.total() * start)

    if train(shared, STARTS[1]) == train(shared, 0):
        return []
    gains = sorted(min(train(each, start) for each in whole) / train(shared, start) for start in STARTS)
    return [
        f"  An H100 waits until {shared.work['train'].total():,.0f} operations an update are started: at "
        f"{STARTS[0] * 1e6:.0f} to {STARTS[1] * 1e6:.0f} microseconds each, training {times(gains)}. More "
        "completions a micro-batch start fewer."
    ]


def seconds_in_words(predictions: list[Prediction], run: Prediction, measured: dict[str, float]) -> list[str]:
    """Seconds of each way, from those of a measured `run`."""
    speed = Speed(sum(balances(run.setup)) / 2 * BANDWIDTH, BANDWIDTH)
    lines = []
    for each in predictions:
        taken = [
            f"{word} {measured[phase] * seconds(each.work[phase], speed) / seconds(run.work[phase], speed):.1f} s"
            for phase, word in PHASES.items()
            if measured.get(phase) and phase in each.work.keys() & run.work.keys()
        ]
        if taken:
            lines.append(f"{each.arm}: {', '.join(taken)} an update")
    return lines
