"""What a phase holds as a sum over its lengths: found from a few simulations, for the page that answers without any.

At one allocation of a simulation (see `Simulation.allocation`), what is alive is a sum of terms in the tokens of a
prompt P, of a completion C, and the completions k: weights that do not depend on them, hidden states of k (P + C)
tokens, masks of k (P + C)^2 entries, the tiles of the LM head, the room that a cache has. `TERMS` names them, least
squares finds how many bytes of each kind belong to which term, and a peak is the highest of all allocations. Where
other lengths make other allocations, each of these regimes has its own sums.

The page (visualization/fit) evaluates the same formulas; a test compares both with the planner.
"""

import functools
import math
import random
from dataclasses import dataclass, replace

import numpy as np

from experiments.plan import extrapolate
from experiments.plan.setups import Setup
from experiments.plan.sharding import SHARDED
from experiments.plan.simulate import PHASES, REFERENCE

LM_HEAD_TILE = 4096  # tokens that TRL's fused LM head works on at a time on CUDA; a test holds it to TRL's
MOST_OFF = 1e-4  # relative: an allocation that is further from every sum is not the same at all lengths
FIRST_ROOM = 64  # tokens that the cache of shared prompts has room for at first, and gets at least (`MIN_NEW_STEPS`)
# What the page offers. Two completions go together in a pass of `shared`, so k is even; from 4 on there are passes.
LEAST = {"prompt": 64, "completion": 64, "k": 4}
MOST = {"prompt": 65_536, "completion": 32_768, "k": 128}
PER_PASS = 2
PASSES_THAT_TELL = (6, 8, 10)  # k, of passes of two. Three are the fewest with a first, a last, and one between
ARMS = ("stock", "stock-accumulate", "shared")
# A term is its own formula, in what Python and JavaScript have in common. P and C are tokens of the prompt and of a
# completion, W those that a layer sees that slides; (P > W) is 1 or 0. See `rooms` and `block` for the others.
GENERATE = ("k", "P", "k*P", "k*C")
TERMS = {
    ("stock", "generate"): GENERATE,
    ("stock-accumulate", "generate"): GENERATE,
    ("shared", "generate"): ("k", "P", "k*P", "k*C", "k*room(P,C,0)", "k*before(P,C,0)"),
    ("stock", "train"): ("k", "P", "C", "k*P", "k*C", "k*P*P", "k*P*C", "k*C*C"),
    ("stock-accumulate", "train"): ("P", "C", "P*P", "P*C", "C*C"),
    ("shared", "train"): ("k", "P", "C", "k*P", "k*C"),
}
OF_WINDOWS = {
    ("stock", "generate"): ("k*min(P,W)", "k*min(P+C,W)", "k*P*P", "P*P"),
    ("shared", "generate"): (
        "prefix(P,C,W)",
        "min(P,W-min(C,W))",
        "k*min(P,W-min(C,W))",
        "k*min(C,W)",
        "k*room(P,C,W)",
        "k*before(P,C,W)",
        "P*P",
    ),
    ("shared", "train"): ("P*C", "(P>=W)*P*P", "block(P,C)", "C*block(P,C)", "k*P*C", "k*C*block(P,C)"),
}
OF_WINDOWS["stock-accumulate", "generate"] = OF_WINDOWS["stock", "generate"]
# Completions of a pass attend together, or not: if they are at most a quarter of the prompt, see `ReadPrefix`
TOGETHER = (f"({4 * PER_PASS}*C<=P)", f"({4 * PER_PASS}*C>P)")


# Events that come after the layers, where the LM head is, or what it has left
AT_HEAD = ("head", "head's backward", "head's end", "logits", "behind")


def tiles(arm: str) -> tuple[str, ...]:
    """What the LM head works on at a time, and what there is besides if that is not all."""
    tokens = "C" if arm == "stock-accumulate" else "k*C"
    return f"min({tokens},{LM_HEAD_TILE})", f"({tokens}>{LM_HEAD_TILE})", f"({tokens}>{LM_HEAD_TILE})*{tokens}"


def regimes(arm: str, window: int | None, phase: str, event: str, role: str = "other") -> tuple[str, ...]:
    """Formulas that are 1 at lengths where allocations behind an event are the same ones, at visits of this role
    (`extrapolate.ALONE`), and 0 elsewhere. All of them are 0 where there is no such visit."""
    event = event.removeprefix(REFERENCE)
    if arm == "shared" and event == "backward" and role == "other":  # neither the first pass nor the last
        return tuple(f"{when}*(k>{2 * PER_PASS})" for when in regimes(arm, window, phase, event, "first"))
    if arm == "shared" and event == "grow":  # beyond the first room, and the token that is decoded last
        return tuple(f"{when}*(C>{FIRST_ROOM + 3})" for when in regimes(arm, window, phase, "forward"))
    if phase == "generate" and window:
        if arm == "shared":
            return ("(P<=W)", "(P>W)")
        return ("(P+C<W)", "(P<W)*(P+C>=W)", "(P>=W)")
    if phase in ("score", "train"):
        if event in AT_HEAD:
            return ("1", tiles(arm)[1])  # a second tile has allocations of its own
        if window and arm == "shared":
            return ("(P<W)", "(P>=W)") if event.startswith("prompt's") else TOGETHER
    return ("1",)


@functools.lru_cache(10_000)
def rooms(prompt: int, completion: int, window: int) -> tuple[int, int, int]:
    """Tokens that the cache of shared prompts has room for behind a prompt when the last of a completion is decoded,
    and before it last grew; and those of the prompt that it keeps. `window`: of a layer that slides, else 0."""
    size, before, kept, steps, prefix = FIRST_ROOM, 0, 1, 1, prompt
    last = max(completion - 2, 1)
    while steps < last:
        if kept == size:
            if window and prompt + steps > window:
                kept = min(kept, window - 1)
                prefix = min(prompt, max(0, window - steps))
            before, size = size, kept + max(FIRST_ROOM, kept // 8)
        filled = min(size - kept, last - steps)
        kept, steps = kept + filled, steps + filled
    return size, before, prefix


def block(prompt: int, completion: int) -> int:
    """Tokens of completions that attend together."""
    return PER_PASS * completion if 4 * PER_PASS * completion <= prompt else completion


def value(formula: str, window: int | None, lengths: tuple[int, int, int]) -> float:
    """Of a term or a regime at a prompt, a completion and a k."""
    prompt, completion, k = lengths
    names = {
        "P": prompt, "C": completion, "k": k, "W": window or 0, "min": min, "block": block,
        "room": lambda *lengths: rooms(*lengths)[0], "before": lambda *lengths: rooms(*lengths)[1],
        "prefix": lambda *lengths: rooms(*lengths)[2],
    }  # fmt: skip
    return float(eval(compiled(formula), {"__builtins__": {}}, names))


@functools.cache
def compiled(formula: str):
    return compile(formula, formula, "eval")


def terms(arm: str, window: int | None, phase: str, event: str) -> tuple[str, ...]:
    """`window`: of the layers that slide, where some do."""
    key = (arm, "train" if phase == "score" else phase)
    found = ("1", *TERMS.get(key, ()), *(OF_WINDOWS.get(key, ()) if window else ()))
    return found + tiles(arm) if key[1] == "train" and event.removeprefix(REFERENCE) in AT_HEAD else found


def table_of(formulas: tuple[str, ...], window: int | None, lengths) -> np.ndarray:
    """Values of formulas, a row for each of these lengths."""
    return np.array([[value(formula, window, each) for formula in formulas] for each in lengths])


@dataclass(frozen=True)
class Regime:
    """`stretches`: bytes of each kind a term at allocations that can be the highest, at lengths where `when` is 1."""

    when: str
    stretches: list[dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Curves:
    """Of one arm of one model: what is alive, by phase. `error` is the largest relative error in the simulations that
    they come from: of a phase's peak, or of a stretch that is no allocation, see `fitted_regime`."""

    arm: str
    window: int | None
    phases: dict[str, list[Regime]]
    error: float

    def peaks(self, prompt: int, completion: int, k: int) -> dict[str, dict[str, float]]:
        """Bytes by kind at the peak of each phase."""
        return {
            phase: max(sizes_at(regimes, self.window, (prompt, completion, k)), key=extrapolate.on_device)
            for phase, regimes in self.phases.items()
        }


def sizes_at(regimes: list[Regime], window: int | None, lengths: tuple[int, int, int]) -> list[dict[str, float]]:
    """Bytes by kind of each stretch that counts at these lengths."""
    return [
        {
            kind: sum(size * value(term, window, lengths) for term, size in by_term.items())
            for kind, by_term in kinds.items()
        }
        for regime in regimes
        if value(regime.when, window, lengths)
        for kinds in regime.stretches
    ]


def some_lengths(number: int, seed: int, most: dict[str, int]) -> list[tuple[int, int, int]]:
    """Prompts, completions and even k between `LEAST` and `most`, each order of magnitude as likely."""
    rng = random.Random(seed)

    def of(name: str) -> int:
        return round(math.exp(rng.uniform(math.log(LEAST[name]), math.log(most[name]))))

    return [(of("prompt"), of("completion"), of("k") // 2 * 2) for _ in range(number)]


EVENTS = ("forward", "prompt's forward", "head", "grow")  # of every family of regimes that have different lengths


def simulated_lengths(arm: str, window: int | None) -> dict[tuple[int, int, int], bool]:
    """Lengths whose simulations tell the terms apart in every regime, and whether that needs more than generation: of
    many that do not take long, those that differ most in their terms, and one more in each to see errors."""
    candidates = [
        (prompt, completion, k)
        for prompt, completion, k in some_lengths(6000, 1, {"prompt": 5000, "completion": 6000, "k": 40})
        if arm != "shared" or k in PASSES_THAT_TELL
        if k * (prompt + completion) <= 60_000
    ]
    rows = {}  # of the terms at each candidate: of a phase and a regime
    for phase in ("train", "generate"):
        for event in EVENTS:
            formulas = terms(arm, window, phase, event)
            table = table_of(formulas, window, candidates)
            for when in regimes(arm, window, phase, event):
                rows[phase, when, formulas] = table / table.max(axis=0) * table_of((when,), window, candidates)
    chosen: dict[int, bool] = {}

    def choose(left: dict) -> int:  # what differs most from those that are chosen, over all regimes
        sizes = {key: np.linalg.norm(each, axis=1) for key, each in left.items()}
        differs = sum(size / size.max() for size in sizes.values())
        differs[list(chosen)] = -1
        index = int(differs.argmax())
        chosen[index] = any(np.abs(each[index]).max() > 1e-6 for key, each in left.items() if key[0] == "train")
        return index

    left = {key: each for key, each in rows.items() if each.any()}
    while left:
        index = choose(left)
        left = {key: without(each, each[index]) for key, each in left.items()}
        left = {key: each for key, each in left.items() if np.abs(each).max() > 1e-6}
    # One more in each, of the k between the others where only some k are simulated
    middle = np.array([[arm != "shared" or k == PASSES_THAT_TELL[1]] for _, _, k in candidates])
    left = {key: each * middle for key, each in rows.items() if (each * middle).any()}
    while left:
        index = choose(left)
        left = {key: each for key, each in left.items() if not each[index].any()}
    return {candidates[i]: passes for i, passes in chosen.items()}


def without(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The part of each of `rows` that is perpendicular to `row`."""
    size = row @ row
    return rows if size < 1e-18 else rows - np.outer(rows @ row / size, row)


def stretches_at(setup: Setup, hf_config, arm: str, lengths: tuple[int, int, int], passes: bool = True) -> dict:
    """Bytes by kind at each event and each allocation of the simulation, with all layers and every pass, see
    `Simulation.run` and `extrapolate.highest`. Without `passes`, only loading and generation."""
    prompt, completion, k = lengths
    rows = dict(prompt_tokens=prompt, max_completion_length=completion, num_generations=k)
    setup = replace(setup, **rows, per_device_train_batch_size=k).arm(arm)
    rounds = extrapolate.Rounds.of(hf_config, 3)
    if rounds is None:
        return extrapolate.highest(extrapolate.simulate(setup, hf_config, passes))
    configs = [extrapolate.with_layers(hf_config, count) for count in (rounds.few, rounds.more)]
    pair = [extrapolate.simulate(setup, config, passes) for config in configs]
    return extrapolate.highest(rounds.all_layers(*pair))


def curves_of(setup: Setup, hf_config, arm: str, window: int | None) -> Curves:
    """Simulates what tells the terms apart, and fits them."""
    lengths = simulated_lengths(arm, window)
    return fitted(arm, window, {each: stretches_at(setup, hf_config, arm, each, lengths[each]) for each in lengths})


def fitted(arm: str, window: int | None, simulated: dict[tuple[int, int, int], dict]) -> Curves:
    """The curves through simulated stretches, by lengths."""
    phases, errors = {}, []
    for phase in PHASES:
        mine = {
            lengths: {p: kinds for p, kinds in each.items() if p[0] == phase} for lengths, each in simulated.items()
        }
        mine = {lengths: each for lengths, each in mine.items() if each}
        by_regime: dict[tuple, set[tuple[str, str]]] = {}
        for visits in sorted({visits_of(place) for each in mine.values() for place in each}):
            formulas = terms(arm, window, phase, visits[0])
            for when in regimes(arm, window, phase, *visits):
                by_regime.setdefault((when, formulas), set()).add(visits)
        found = [fitted_regime(window, phase, *key, visits, mine) for key, visits in by_regime.items()]
        phases[phase] = [regime for regime, _ in found if regime.stretches]
        errors += [error for _, error in found]
    curves = Curves(arm, window, phases, 0.0)
    errors += [relative_error(curves, lengths, each) for lengths, each in simulated.items()]
    return replace(curves, error=max(errors))


def visits_of(place: tuple) -> tuple[str, str]:
    """The event and the role of the visits of a (phase, event or allocation, layer, role)."""
    return extrapolate.event_of(place[1]), place[3]


def is_event(place: tuple) -> bool:
    """Not an allocation behind one."""
    return extrapolate.of_event(place) == place


def fitted_regime(
    window, phase: str, when: str, formulas: tuple[str, ...], visits: set, simulated: dict
) -> tuple[Regime, float]:
    """By least squares, relative to the phase's peak at each length: the allocations of these visits that count. And
    how far, relative to what is alive besides weights, peaks between events are from their sums, where they stand for
    allocations that have none: they need not have one, and elsewhere it can be anything."""
    simulated = {lengths: result for lengths, result in simulated.items() if value(when, window, lengths)}
    if not simulated:
        return Regime(when, []), 0.0
    results = [
        {place: kinds for place, kinds in result.items() if visits_of(place) in visits}
        for result in simulated.values()
    ]
    peaks = np.array([highest(result, phase) for result in simulated.values()])
    table = table_of(formulas, window, simulated)
    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1
    weighted = table / scale / peaks[:, None]
    kinds = sorted(
        {kind for result in results for each in result.values() for kind in each} - {"host"} | {"activations"}
    )
    there = sorted(set.intersection(*map(set, results)), key=str)
    if not there:
        return Regime(when, []), 0.0
    sharded = np.array([kind in SHARDED for kind in kinds])
    activations = kinds.index("activations")
    sizes, differ = sizes_of(results, there, kinds)
    sizes /= peaks[:, None, None]
    flat = sizes.reshape(len(results), -1)
    off = np.abs(weighted @ np.linalg.lstsq(weighted, flat, rcond=1e-9)[0] - flat).reshape(sizes.shape)
    most = sizes[:, :, activations].max(axis=1)[:, None]
    fits = (off[:, :, activations] < MOST_OFF * most).all(axis=0) & (off.max(axis=2) < 0.01 * most).all(axis=0)
    fits &= differ < MOST_OFF * peaks.min()
    allocations = [place for place, good in zip(there, fits, strict=True) if good and not is_event(place)]
    places = with_events(allocations, results, there)
    if not places:
        return Regime(when, []), 0.0
    index = {place: i for i, place in enumerate(there)}
    events = [index[place] for place in places if is_event(place)]
    error = float((off[:, events, activations] / np.maximum(most, 1e-3)).max(initial=0))
    found = fewest_terms(weighted, sizes[:, [index[place] for place in places]].reshape(len(results), -1))
    found = (found / scale[:, None]).reshape(len(formulas), len(places), len(kinds))
    others = [i for i in np.flatnonzero(~sharded) if i != activations]
    found[:, :, activations] -= found[:, :, others].sum(axis=2)
    return Regime(when, highest_anywhere(window, when, formulas, kinds, found)), error


def sizes_of(results: list[dict], places: list[tuple], kinds: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes at these places, of shape (results, places, kinds), and by place how much weights and what has their sizes
    differ. In place of activations is the sum of all that is not sharded: it must be right, so it is what is fitted,
    and activations are what the other kinds leave of it."""
    sizes = [[[result[place].get(kind, 0) for kind in kinds] for place in places] for result in results]
    sizes = np.array(sizes, float)
    sharded, activations = np.array([kind in SHARDED for kind in kinds]), kinds.index("activations")
    # Weights are the same at all lengths: else the names are those of other allocations. But for gradients of norms:
    # which of them count as activations depends on the pass
    more = np.where(sharded, sizes.max(axis=0) - sizes, 0)
    sizes += more
    sizes[:, :, activations] -= more.sum(axis=2)
    sizes[:, :, activations] = sizes[:, :, ~sharded].sum(axis=2)
    return sizes, more.max(axis=(0, 2))


def highest_anywhere(window, when: str, formulas: tuple[str, ...], kinds: list[str], found: np.ndarray) -> list[dict]:
    """Of `found`, of shape (formulas, places, kinds), the places that are the highest somewhere on the page: on one
    device, or on so many that what is sharded takes nothing. As `Regime.stretches`."""
    sharded = np.array([kind in SHARDED for kind in kinds])
    lengths = [each for each in some_lengths(6000, 2, MOST) if value(when, window, each)]
    table = table_of(formulas, window, lengths)
    alone = (table @ found.sum(axis=2)).argmax(axis=1)
    spread = (table @ found[:, :, ~sharded].sum(axis=2)).argmax(axis=1)
    return [
        {
            kind: {formula: float(f"{x:.7g}") for formula, x in zip(formulas, found[:, place, i], strict=True) if x}
            for i, kind in enumerate(kinds)
            if found[:, place, i].any()
        }
        for place in sorted({*alone, *spread})
    ]


def fewest_terms(table: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Least squares, a column for each of `sizes`, without the terms that are not needed: what rounding leaves of them
    would be much far from the simulations."""

    def solved(terms, column):
        found = np.zeros(table.shape[1])
        found[terms] = np.linalg.lstsq(table[:, terms], column, rcond=1e-9)[0]
        return found, np.abs(table @ found - column).max()

    columns, of = np.unique(sizes, axis=1, return_inverse=True)
    result = np.zeros((table.shape[1], columns.shape[1]))
    for i, column in enumerate(columns.T):
        kept = list(range(table.shape[1]))
        found, error = solved(kept, column)
        enough = max(1e-7, 2 * error)
        for term in reversed(range(table.shape[1])):
            fewer = [each for each in kept if each != term]
            simpler, error = solved(fewer, column)
            if error < enough:
                kept, found = fewer, simpler
        result[:, i] = found
    return result[:, of.reshape(-1)]


def highest(stretches: dict[tuple, dict[str, int]], phase: str) -> int:
    """Bytes at the peak of a phase: of the highest between events, not of single allocations, of which one that was
    taken for another would go unseen."""
    return max(extrapolate.on_device(kinds) for p, kinds in stretches.items() if p[0] == phase and is_event(p))


def with_events(allocations: list[tuple], results: list[dict], everywhere: list[tuple]) -> list[tuple]:
    """`allocations`, and where another one is higher than these behind its event, the highest of them."""
    places = set(allocations)
    events = set(filter(is_event, everywhere))
    for result in results:
        most: dict[tuple, int] = {}
        for place in allocations:
            event = extrapolate.of_event(place)
            most[event] = max(most.get(event, 0), extrapolate.on_device(result[place]))
        places |= {event for event in events if extrapolate.on_device(result[event]) > 1.001 * most.get(event, 0)}
    return sorted(places, key=str)


def relative_error(curves: Curves, lengths: tuple[int, int, int], stretches: dict[tuple, dict[str, int]]) -> float:
    """The largest of all phases, of their peaks."""
    peaks = curves.peaks(*lengths)
    phases = {place[0] for place in stretches}
    return max(abs(extrapolate.on_device(peaks[phase]) / highest(stretches, phase) - 1) for phase in phases)
