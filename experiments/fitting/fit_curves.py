"""What a phase holds as a sum over its lengths: found from a few simulations, for the page that answers without any.

At one allocation of a simulation (see `Simulation.allocation`), what is alive is a sum of terms in the tokens of a
prompt P, of a completion C, and the completions k: weights that do not depend on them, hidden states of k (P + C)
tokens, masks of k (P + C)^2 entries, the tiles of the LM head, the room that a cache has. `fit_terms` names them,
least squares finds how many bytes of each kind belong to which term, and a peak is the highest of all allocations.
Where other lengths make other allocations, each of these regimes has its own sums.
"""

import math
import random
from dataclasses import dataclass, replace

import numpy as np

from experiments.fitting.fit_terms import LEAST, MOST, PASSES, regimes, table_of, terms, value
from rloo_memory.plan.levers import planned
from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.scale_up.sharding import SHARDED
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.simulate import PHASES

MOST_OFF = 1e-4  # relative: an allocation that is further from every sum is not the same at all lengths
LEAST_ALIVE = 0.01  # of a phase's peak: errors are relative to no less
# k where a prompt is shared: completions are scored in passes of two, on several cards also trained on so. Four passes
# are the fewest with a first, a last, and the two ends of the line between them
PASSES_THAT_TELL = (8, 10, 12)
ARMS = ("stock", "stock-accumulate", "shared")


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
        if not arm.startswith("shared") or k in PASSES_THAT_TELL
        if k * (prompt + completion) <= 60_000
    ]
    rows = {}  # of the terms at each candidate: of a phase and a regime
    for phase in ("train", "score", "generate"):
        for event in EVENTS:
            formulas = terms(arm, window, phase, event)
            table = table_of(formulas, window, candidates)
            for when in regimes(arm, window, phase, event):
                rows[phase, when, formulas] = table / table.max(axis=0) * table_of((when,), window, candidates)
    chosen: dict[int, bool] = {}

    def choose(left: dict) -> int:  # what differs most from those that are chosen, over all regimes
        sizes = {key: np.linalg.norm(each, axis=1) for key, each in left.items()}
        differs = sum(size / size.max() for size in sizes.values())
        index = int(differs.argmax())
        chosen[index] = any(np.abs(each[index]).max() > 1e-6 for key, each in left.items() if key[0] != "generate")
        return index

    left = {key: each for key, each in rows.items() if each.any()}
    while left:
        index = choose(left)
        left = {key: without(each, each[index]) for key, each in left.items()}
        left = {key: each for key, each in left.items() if np.abs(each).max() > 1e-6}
    # One more in each, of the k between the others where only some k are simulated
    middle = np.array([[not arm.startswith("shared") or k == PASSES_THAT_TELL[1]] for _, _, k in candidates])
    middle[list(chosen)] = False
    left = {key: each * middle for key, each in rows.items() if (each * middle).any()}
    while left:
        index = choose(left)
        left = {key: each for key, each in left.items() if not each[index].any()}
    return {candidates[i]: passes for i, passes in chosen.items()}


def without(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The part of each of `rows` that is perpendicular to `row`."""
    size = row @ row
    return rows if size < 1e-18 else rows - np.outer(rows @ row / size, row)


def setup_at(setup: Setup, arm: str, lengths: tuple[int, int, int]) -> Setup:
    """As the planner plans an arm of a prompt with its k completions."""
    prompt, completion, k = lengths
    rows = dict(prompt_tokens=prompt, max_completion_length=completion, num_generations=k)
    return planned(arm, replace(setup, **rows, per_device_train_batch_size=k))


def stretches_at(setup: Setup, hf_config, passes: bool = True) -> dict:
    """Bytes by kind at each event and each allocation of the simulation, with all layers and every pass, see
    `Simulation.run` and `extrapolate.highest`. Without `passes`, only loading and generation."""
    rounds = extrapolate.Rounds.of(hf_config, 3)
    if rounds is None:
        return extrapolate.highest(extrapolate.simulate(setup, hf_config, passes))
    configs = [extrapolate.with_layers(hf_config, count) for count in (rounds.few, rounds.more)]
    pair = [extrapolate.simulate(setup, config, passes) for config in configs]
    return extrapolate.highest(rounds.all_layers(*pair))


def curves_of(setup: Setup, hf_config, arm: str, window: int | None) -> Curves:
    """Simulates what tells the terms apart, and fits them."""
    way = PASSES if arm == "shared" and setup.num_devices > 1 else arm
    lengths = simulated_lengths(way, window)
    return fitted(
        way,
        window,
        {each: stretches_at(setup_at(setup, arm, each), hf_config, passes) for each, passes in lengths.items()},
    )


def fitted(arm: str, window: int | None, simulated: dict[tuple[int, int, int], dict]) -> Curves:
    """The curves through simulated stretches, by lengths."""
    phases, errors = {}, []
    peaks = {lengths: event_peaks(each) for lengths, each in simulated.items()}
    for phase in PHASES:
        mine = {lengths: by_visits(each, phase) for lengths, each in simulated.items() if phase in peaks[lengths]}
        by_regime: dict[tuple, list[tuple[str, str]]] = {}
        for visits in sorted({visits for each in mine.values() for visits in each}):
            formulas = terms(arm, window, phase, visits[0])
            for when in regimes(arm, window, phase, visits[0]):
                by_regime.setdefault((when, formulas), []).append(visits)
        found = []
        for (when, formulas), several in by_regime.items():
            here = [lengths for lengths in mine if value(when, window, lengths)]
            results = [{p: x for visits in several for p, x in mine[each].get(visits, {}).items()} for each in here]
            table = table_of(formulas, window, here)
            sizes = np.array([peaks[each][phase] for each in here])
            found.append(fitted_regime(window, when, formulas, table, results, sizes))
        phases[phase] = [regime for regime, _ in found if regime.stretches]
        errors += [error for _, error in found]
    curves = Curves(arm, window, phases, 0.0)
    errors += [relative_error(curves, lengths, each) for lengths, each in peaks.items()]
    return replace(curves, error=max(errors))


def by_visits(stretches: dict, phase: str) -> dict[tuple[str, str], dict]:
    """Those of a phase, by their event and the role of its visits. "Between" the others none is higher than these."""
    found: dict[tuple[str, str], dict] = {}
    for place, kinds in stretches.items():
        if place[0] == phase and place[3] != "between":
            found.setdefault((extrapolate.event_of(place[1]), place[3]), {})[place] = kinds
    return found


def is_event(place: tuple) -> bool:
    """Not an allocation behind one."""
    return extrapolate.event_of(place[1]) == place[1]


def fitted_regime(
    window, when: str, formulas: tuple[str, ...], table: np.ndarray, results: list[dict], peaks: np.ndarray
) -> tuple[Regime, float]:
    """By least squares, relative to the phase's peak at each length: of the stretches in `results`, at lengths where
    the terms have the values of `table`, the allocations that count. And how far, relative to what is alive besides
    weights, peaks between events are from their sums, where they stand for allocations that have none: they need not
    have one, and elsewhere it can be anything."""
    there = sorted(set.intersection(*map(set, results)), key=str) if results else []
    if not there:
        return Regime(when, []), 0.0
    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1
    weighted = table / scale / peaks[:, None]
    kinds = sorted(
        {kind for result in results for each in result.values() for kind in each} - {"host"} | {"activations"}
    )
    sharded = np.array([kind in SHARDED for kind in kinds])
    activations = kinds.index("activations")
    sizes, differ = sizes_of(results, there, kinds)
    sizes /= peaks[:, None, None]
    flat = sizes.reshape(len(results), -1)
    off = np.abs(weighted @ np.linalg.lstsq(weighted, flat, rcond=1e-9)[0] - flat).reshape(sizes.shape)
    most = np.maximum(sizes[:, :, activations].max(axis=1), LEAST_ALIVE)[:, None]
    fits = (off[:, :, activations] < MOST_OFF * most).all(axis=0) & (off.max(axis=2) < 0.01 * most).all(axis=0)
    fits &= differ < MOST_OFF * peaks.min()
    allocations = [place for place, good in zip(there, fits, strict=True) if good and not is_event(place)]
    places = with_events(allocations, results, there)
    if not places:
        return Regime(when, []), 0.0
    index = {place: i for i, place in enumerate(there)}
    events = [index[place] for place in places if is_event(place)]
    error = float((off[:, events, activations] / most).max(initial=0))
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


def event_peaks(stretches: dict[tuple, dict[str, int]]) -> dict[str, int]:
    """Bytes at the peak of each phase: of the highest between events, not of single allocations, of which one that was
    taken for another would go unseen."""
    peaks: dict[str, int] = {}
    for place in filter(is_event, stretches):
        peaks[place[0]] = max(peaks.get(place[0], 0), extrapolate.on_device(stretches[place]))
    return peaks


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


def relative_error(curves: Curves, lengths: tuple[int, int, int], peaks: dict[str, int]) -> float:
    """The largest of all phases, of their `event_peaks`."""
    found = curves.peaks(*lengths)
    return max(abs(extrapolate.on_device(found[phase]) / size - 1) for phase, size in peaks.items())
