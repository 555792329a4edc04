"""What a phase holds as a sum over its lengths: found from a few simulations, for the page that answers without any.

Between two events of a simulation (see `Simulation.run`), what is alive is a sum of terms in the tokens of a prompt P,
of a completion C, and the completions k: weights that do not depend on them, hidden states of k (P + C) tokens, masks
of k (P + C)^2 entries, the tiles of the LM head, the room that a cache has. `TERMS` names them; least squares finds
how many bytes of each kind belong to which term. A peak is the highest of these stretches, so those that are never
highest are left out.

The page has the same terms in its own language (`visualization/fit/fit.js`); a test compares both with the planner.
"""

import math
import random
from dataclasses import dataclass, replace

import numpy as np

from experiments.plan import extrapolate
from experiments.plan.setups import Setup
from experiments.plan.sharding import SHARDED

LM_HEAD_TILE = 4096  # tokens that TRL's fused LM head works on at a time on CUDA; a test holds it to TRL's
FIRST_ROOM = 64  # tokens that the cache of shared prompts has room for at first, and gets at least (`MIN_NEW_STEPS`)
# What the page offers. Two completions go together in a pass of `shared`, so k is even; from 4 on there are passes.
LEAST = {"prompt": 64, "completion": 64, "k": 4}
MOST = {"prompt": 65_536, "completion": 32_768, "k": 128}
PER_PASS = 2
ARMS = ("stock", "stock-accumulate", "shared")


def rooms(prompt: int, completion: int, window: int | None = None) -> tuple[int, int]:
    """Tokens that the cache of shared prompts has room for behind a prompt when the last of a completion is decoded,
    and before it last grew. `window`: of a layer that slides."""
    size, before, kept, steps = FIRST_ROOM, 0, 1, 1
    last = max(completion - 2, 1)
    while steps < last:
        seen = prompt - 1 + steps + 1
        if kept == size:
            if window is not None and seen > window:
                kept = min(kept, window - 1)
            before, size = size, kept + max(FIRST_ROOM, kept // 8)
        filled = min(size - kept, last - steps)
        kept, steps = kept + filled, steps + filled
    return size, before


def terms(arm: str, window: int | None, phase: str, prompt: int, completion: int, k: int) -> dict[str, float]:
    """The value of each term of a phase of an arm at these lengths, by name. `window`: of layers that slide, if some
    do."""
    P, C = prompt, completion
    values = {"1": 1.0}
    if phase not in ("generate", "score", "train"):
        return values
    if phase == "generate":
        values |= {"k": k, "kP": k * P}
        if arm != "shared":
            values |= {"kC": k * C}
            values |= {} if window is None else {"prompt seen": k * min(P, window), "seen": k * min(P + C, window)}
            return values
        room, before = rooms(P, C)
        values |= {"P": P, "room": k * room, "room before": k * before}
        if window is not None:
            room, before = rooms(P, C, window)
            values |= {"prompt seen": min(P, window), "window": k * room, "window before": k * before}
        return values
    if arm == "stock":  # k rows, and a mask for each where they are padded
        values |= {"k": k, "P": P, "C": C, "kP": k * P, "kC": k * C, "head": min(k * C, LM_HEAD_TILE)}
        return values | {"kPP": k * P * P, "kPC": k * P * C, "kCC": k * C * C}
    if arm == "stock-accumulate":  # one row
        return values | {"P": P, "C": C, "head": min(C, LM_HEAD_TILE), "PP": P * P, "PC": P * C, "CC": C * C}
    values |= {"k": k, "P": P, "C": C, "kP": k * P, "kC": k * C, "head": min(k * C, LM_HEAD_TILE)}
    if window is not None:
        together = PER_PASS * C if 4 * PER_PASS * C <= P else C  # see `ReadPrefix` of the fork
        values |= {"PC": P * C, "block": together, "C block": C * together}
    return values


@dataclass(frozen=True)
class Curves:
    """Of one arm of one model, what is alive between events: bytes of each kind a term, by (phase, event, layer,
    role). `error` is the largest relative error of a phase's peak in the simulations that they come from."""

    arm: str
    window: int | None
    stretches: dict[tuple, dict[str, dict[str, float]]]
    error: float

    def peaks(self, prompt: int, completion: int, k: int) -> dict[str, dict[str, float]]:
        """Bytes by kind at the peak of each phase."""
        best: dict[str, dict[str, float]] = {}
        for (phase, *_), kinds in self.stretches.items():
            values = terms(self.arm, self.window, phase, prompt, completion, k)
            sizes = {
                kind: sum(size * values[term] for term, size in by_term.items()) for kind, by_term in kinds.items()
            }
            if extrapolate.on_device(sizes) > extrapolate.on_device(best.get(phase, {})):
                best[phase] = sizes
        return best


def some_lengths(number: int, seed: int, most: dict[str, int]) -> list[tuple[int, int, int]]:
    """Prompts, completions and even k between `LEAST` and `most`, each order of magnitude as likely."""
    rng = random.Random(seed)

    def of(name: str) -> int:
        return round(math.exp(rng.uniform(math.log(LEAST[name]), math.log(most[name]))))

    return [(of("prompt"), of("completion"), of("k") // 2 * 2) for _ in range(number)]


def simulated_lengths(arm: str, window: int | None) -> list[tuple[int, int, int]]:
    """Lengths whose simulations tell the terms apart: of many that do not take long, those that differ most in their
    terms, and a third more than there are terms."""
    candidates = [
        (prompt, completion, k)
        for prompt, completion, k in some_lengths(2000, 1, {"prompt": 4000, "completion": 2500, "k": 40})
        # Three passes are the fewest that have one of each kind: the first, the last, and one between; and three must
        # fill a tile of the LM head, or all together none, see `extrapolate.passes_that_tell`
        if k >= 3 * PER_PASS and (completion * k <= LM_HEAD_TILE or completion * 3 * PER_PASS >= LM_HEAD_TILE)
        if k * (prompt + completion) <= 60_000
    ]
    chosen: list[int] = []
    for phase, more in (("train", 1 / 3), ("generate", 0.0)):
        table = np.array([list(terms(arm, window, phase, *lengths).values()) for lengths in candidates])
        table /= table.max(axis=0)
        number = table.shape[1]
        left = table.copy()
        for index in chosen[: number if phase == "generate" else 0]:
            left = without(left, left[index])
        while np.abs(left).max() > 1e-6:  # what the chosen ones do not yet span
            chosen.append(int(np.linalg.norm(left, axis=1).argmax()))
            left = without(left, left[chosen[-1]])
        chosen += [i for i in range(len(candidates)) if i not in chosen][: round(number * more)]
    return [candidates[i] for i in chosen]


def without(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The part of each of `rows` that is perpendicular to `row`."""
    size = row @ row
    return rows if size < 1e-18 else rows - np.outer(rows @ row / size, row)


def stretches_at(setup: Setup, hf_config, arm: str, lengths: tuple[int, int, int]) -> dict[tuple, dict[str, int]]:
    """Bytes by kind of each stretch of the simulation, see `extrapolate.stretches_of`."""
    prompt, completion, k = lengths
    setup = replace(
        setup,
        prompt_tokens=prompt,
        max_completion_length=completion,
        num_generations=k,
        per_device_train_batch_size=k,
    ).arm(arm)
    tasks = extrapolate.simulations(setup, hf_config)
    return extrapolate.stretches_of(setup, hf_config, tasks, [extrapolate.simulate(*task) for task in tasks])


def fitted(arm: str, window: int | None, simulated: dict[tuple[int, int, int], dict]) -> Curves:
    """The curves through simulated stretches, by lengths."""
    stretches = {}
    for place in set.intersection(*map(set, simulated.values())):
        rows = [terms(arm, window, place[0], *lengths) for lengths in simulated]
        table = np.array([list(row.values()) for row in rows])
        scale = np.abs(table).max(axis=0)
        each = [result[place] for result in simulated.values()]
        total = np.array([max(extrapolate.on_device(kinds), 1) for kinds in each], float)
        weighted = table / scale / total[:, None]
        stretches[place] = {}
        for kind in sorted(set().union(*each)):
            sizes = np.array([kinds.get(kind, 0) for kinds in each], float)
            found = np.linalg.lstsq(weighted, sizes / total, rcond=None)[0]
            # What rounding leaves of a term that is not there
            there = np.abs(weighted * found).max(axis=0) > 1e-6
            by_term = {n: float(f"{x:.7g}") for n, x, y in zip(rows[0], found / scale, there, strict=True) if y}
            if by_term:
                stretches[place][kind] = by_term
    curves = Curves(arm, window, stretches, 0.0)
    error = max(relative_error(curves.peaks(*lengths), result) for lengths, result in simulated.items())
    return highest_only(replace(curves, error=error))


def relative_error(peaks: dict[str, dict[str, float]], stretches: dict[tuple, dict[str, int]]) -> float:
    """The largest of all phases, of their peaks."""
    exact: dict[str, int] = {}
    for (phase, *_), kinds in stretches.items():
        exact[phase] = max(exact.get(phase, 0), extrapolate.on_device(kinds))
    return max(abs(extrapolate.on_device(peaks[phase]) / size - 1) for phase, size in exact.items())


def highest_only(curves: Curves) -> Curves:
    """Without the stretches that are a phase's highest nowhere on the page: on one device, or on so many that what is
    sharded takes nothing."""
    kept = set()
    for lengths in some_lengths(1500, 2, MOST):
        best: dict[tuple, tuple[float, tuple]] = {}
        for place, kinds in curves.stretches.items():
            values = terms(curves.arm, curves.window, place[0], *lengths)
            sizes = {
                kind: sum(size * values[term] for term, size in by_term.items()) for kind, by_term in kinds.items()
            }
            here, sharded = extrapolate.on_device(sizes), sum(sizes.get(kind, 0) for kind in SHARDED)
            for key, size in (((place[0], 1), here), ((place[0], 2), here - sharded)):
                best[key] = max(best.get(key, (-1.0, place)), (size, place), key=lambda item: item[0])
        kept |= {place for _, place in best.values()}
    return replace(curves, stretches={place: curves.stretches[place] for place in curves.stretches if place in kept})
