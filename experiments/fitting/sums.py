"""What each phase holds as sums of terms in its lengths, for the page that answers without a simulation.

At one allocation of a simulation what is alive is a sum of few terms in the tokens of a prompt P, of a completion C,
and the completions k: weights, which do not depend on them, hidden states of k (P + C) tokens, masks of their squares,
tiles of the LM head, the room in a cache. Least squares finds how many bytes of each kind belong to which term, from
simulations of a few lengths. The peak of a phase is the highest of its stretches.

A term is a formula that means the same in Python and in JavaScript, so the page (visualization/fit/sums.js) takes
terms and bytes as data. W are the tokens that a layer sees which slides.
"""

import math
import random
from dataclasses import replace

import numpy as np

from rloo_memory.plan.scale_up import extrapolate
from rloo_memory.plan.scale_up.sharding import SHARDED
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.simulate import PHASES

FIRST_ROOM = 64  # tokens that the cache of shared prompts has room for at first (`MIN_NEW_STEPS`)
TOGETHER = 2  # completions in a micro-batch of `shared`, so k is even; on several cards, in a pass
# What the page offers
LEAST = {"prompt": 64, "completion": 64, "k": 4}
MOST = {"prompt": 65_536, "completion": 32_768, "k": 128}
# What is simulated: prompts, completions and k that are much and little beside each other, none a long simulation, and
# completions for which the cache grows
LENGTHS = (
    (64, 80, 4), (300, 2000, 8), (3000, 100, 16), (8000, 600, 6), (1000, 6000, 4), (20_000, 300, 40), (60_000, 200, 6),
    (100, 12_000, 4), (500, 400, 64), (30_000, 5000, 6), (2000, 2000, 12), (700, 200, 26), (150, 700, 20),
    (5000, 15_000, 4), (1500, 900, 10), (110, 90, 128),
)  # fmt: skip
# Completions where a prompt is shared: four passes of two are the fewest with a first, a last, and two between
K_OF_SHARED = (8, 10, 12)
MANY_OF_SHARED = ((20_000, 100, 64), (2000, 2000, 40))
PASSES = "shared-passes"  # `shared` on several cards: whole groups in passes, in place of micro-batches
# 4,096 tokens are a tile of TRL's fused LM head on CUDA
TERMS = {
    ("stock", "generate"): ("k", "P", "k*P", "k*C"),
    ("stock", "score"): ("k*P", "k*C", "k*(P+C)**2", "min(k*C,4096)"),
    ("stock-accumulate", "score"): ("P", "C", "(P+C)**2", "min(C,4096)"),
    ("stock-accumulate", "train"): ("P", "C", "(P+C)**2", "min(C,4096)"),
    ("shared", "generate"): ("k", "P", "k*P", "k*C", "k*room(C)", "k*roomBefore(C)"),
    ("shared", "score"): ("P", "C", "k*P", "k*C", "min(k*C,4096)"),
    ("shared", "train"): ("P", "C", "k*P", "k*C", "min(2*C,4096)"),  # ids and masks of all rows
    ("shared", "optimizer"): ("P", "C"),  # ids of the last micro-batch
    (PASSES, "train"): ("P", "C", "k*P", "k*C", "min(k*C,4096)"),
}
# Of completions behind a prompt: masks of layers that see all, where those need one, and of layers with a window,
# which need one where a row is longer. They read what the window reaches of the prompt
MASKS = (
    "P*P", "P*C", "C*C", "C*min(P,W)*(P+C>=W)", "C*C*(P+C>=W)", "min(P,W)*(P+C>=W)", "C*(P+C>=W)",
)  # fmt: skip
OF_WINDOWS = {
    ("stock", "generate"): ("k*min(P,W)", "k*min(P+C,W)", "k*P*P", "P*P"),
    ("shared", "generate"): (
        "k*min(room(C),W+max(64,W/8))",
        "k*min(roomBefore(C),W+max(64,W/8))",
        "P*P",
        "k*P*(k*C>P)",  # without merging (soft-capping), a copy of the prompt for each completion
        # The prompt whole until the cache grows behind its window; then what the window still reaches
        "P*(roomBefore(C)<=max(0,W-P))",
        "max(0,W-roomBefore(C))*(roomBefore(C)>max(0,W-P))",
    ),
    ("shared", "score"): MASKS,
    ("shared", "train"): MASKS,
    (PASSES, "train"): (*MASKS, "k*C*min(P,W)*(P+C>=W)", "k*C*C*(P+C>=W)"),
}
# Of the phase's peak: a place that is further from its sum has another one at other lengths. The next is tried where
# too few are left for the peak
GOOD = (0.004, 0.01, 0.03)
ALMOST = 0.5  # of the phase's peak: a place that never has so much is not looked at
NEAR = 0.003  # of the phase's peak: places that are highest by less are left out


def terms(way: str, phase: str, window: int | None) -> tuple[str, ...]:
    """Of an arm, or of `PASSES`, which has the terms of `shared` but where it trains. `stock` trains as it scores, and
    one completion at a time are generated as all are."""
    arm = {PASSES: "shared", "stock-accumulate": "stock"}.get(way, way)
    places = ((way, phase), (arm, phase), *([] if phase in ("load", "optimizer") else [(way, "score")]))
    of = next((of for of in places if of in TERMS), None)
    return ("1", *TERMS.get(of, ()), *(OF_WINDOWS.get(of, ()) if window else ()))


def room(completion: int) -> tuple[int, int]:
    """Tokens that the cache of shared prompts has room for when a completion is done, and before it last grew."""
    size, before = FIRST_ROOM, 0
    while size < completion - 2:
        size, before = size + max(FIRST_ROOM, size // 8), size
    return size, before


def values(formulas: tuple[str, ...], window: int | None, lengths) -> np.ndarray:
    """Of terms, a row for each of these (prompt, completion, k)."""
    compiled = [compile(formula, formula, "eval") for formula in formulas]
    functions = {"min": min, "max": max, "room": lambda c: room(c)[0], "roomBefore": lambda c: room(c)[1]}
    names = [dict(P=prompt, C=completion, k=k, W=window or 0, **functions) for prompt, completion, k in lengths]
    return np.array([[float(eval(each, {"__builtins__": {}}, of)) for each in compiled] for of in names])


def drawn(rng: random.Random) -> tuple[int, int, int]:
    """(prompt, completion, k), all over the page, each order of magnitude as likely."""
    ends = [(math.log(LEAST[name]), math.log(MOST[name])) for name in LEAST]
    return tuple(round(math.exp(rng.uniform(*each))) for each in ends)


def setup_at(setup: Setup, arm: str, lengths: tuple[int, int, int]) -> Setup:
    """As the planner plans an arm of a prompt with its k completions."""
    prompt, completion, k = lengths
    rows = dict(prompt_tokens=prompt, max_completion_length=completion, num_generations=k)
    return replace(setup, **rows, per_device_train_batch_size=k).arm(arm)


def sums_of(setup: Setup, hf_config, arm: str, window: int | None) -> tuple[dict[str, list[dict]], float]:
    """Simulates and fits, see `fitted`."""
    lengths = LENGTHS
    if arm == "shared":
        lengths = [(prompt, completion, K_OF_SHARED[i % 3]) for i, (prompt, completion, _) in enumerate(LENGTHS)]
        lengths += MANY_OF_SHARED
        if window:  # rows that fit it have no masks, so other allocations
            lengths = [(prompt, max(completion, window + 1 - prompt), k) for prompt, completion, k in lengths]
    simulated = {}
    for each in lengths:
        there = setup_at(setup, arm, each)
        if there.as_run is not there:  # its rows go whole
            continue
        tasks = extrapolate.simulations(there, hf_config)
        results = [extrapolate.simulate(*task) for task in tasks]
        simulated[each] = extrapolate.stretches_of(there, hf_config, tasks, results)
    return fitted(PASSES if arm == "shared" and setup.num_devices > 1 else arm, window, simulated)


def all_terms() -> tuple[str, ...]:
    return tuple(dict.fromkeys(("1", *(term for each in (*TERMS.values(), *OF_WINDOWS.values()) for term in each))))


def fitted(arm: str, window: int | None, simulated: dict) -> tuple[dict[str, list[dict]], float]:
    """{phase: stretches, each {kind: {term: bytes}}} from simulated places by lengths, and the largest relative error
    of a phase's peak there."""
    phases, worst = {}, 0.0
    for phase in PHASES:
        formulas = terms(arm, phase, window)
        mine = [{p: kinds for p, kinds in each.items() if p[0] == phase} for each in simulated.values()]
        peaks = np.array([max(map(extrapolate.on_device, each.values())) for each in mine])
        high = {
            place
            for each, peak in zip(mine, peaks, strict=True)
            for place, kinds in each.items()
            if extrapolate.on_device(kinds) > ALMOST * peak
        }
        places = sorted(high.intersection(*mine), key=str)
        kinds = sorted({kind for each in mine for sizes in each.values() for kind in sizes} - {"host"})
        sizes = np.array([[[each[p].get(kind, 0) for kind in kinds] for p in places] for each in mine], float)
        table = values(formulas, window, simulated)
        weighted = table / peaks[:, None]
        scale = np.abs(weighted).max(axis=0)
        flat = (sizes / peaks[:, None, None]).reshape(len(mine), -1)
        found = least_squares(weighted / scale, flat)
        off = (weighted / scale @ found - flat).reshape(sizes.shape).sum(axis=2)
        found = (found / scale[:, None]).reshape(len(formulas), len(places), len(kinds))
        sharded = np.array([kind in SHARDED for kind in kinds])
        for good in GOOD:
            chosen = found[:, np.abs(off).max(axis=0) < good]
            chosen = chosen[:, highest_somewhere(chosen, formulas, window, sharded)]
            error = np.abs((table @ chosen.sum(axis=2)).max(axis=1, initial=0) / peaks - 1).max()
            if error < GOOD[1]:
                break
        worst = max(worst, error)
        phases[phase] = [
            {
                kind: {formula: float(f"{x:.6g}") for formula, x in zip(formulas, column, strict=True) if x}
                for kind, column in zip(kinds, stretch.T, strict=True)
                if column.any()
            }
            for stretch in chosen.transpose(1, 0, 2)
        ]
    return phases, float(worst)


def least_squares(table: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Without terms that would be negative: no tensor has less than no bytes, and what two terms take from each other
    would be much far from the simulations."""
    different, of = np.unique(columns, axis=1, return_inverse=True)
    found = np.zeros((table.shape[1], different.shape[1]))
    for column, result in zip(different.T, found.T, strict=True):
        kept = np.arange(table.shape[1])
        while len(kept):
            solved = np.linalg.lstsq(table[:, kept], column, rcond=1e-9)[0]
            if solved.min() >= 0:
                result[kept] = solved
                break
            kept = np.delete(kept, solved.argmin())
    return found[:, of.reshape(-1)]


def highest_somewhere(found: np.ndarray, formulas, window, sharded: np.ndarray) -> list[int]:
    """The fewest of the stretches in `found`, of shape (formulas, stretches, kinds), whose highest is near that of
    all, everywhere on the page: on one device, and on so many that what is sharded takes nothing."""
    rng = random.Random(2)
    table = values(formulas, window, [drawn(rng) for _ in range(1000)])
    sums = np.concatenate([table @ found.sum(axis=2), table @ found[:, :, ~sharded].sum(axis=2)])
    near = sums >= (1 - NEAR) * sums.max(axis=1, keepdims=True, initial=0)
    chosen: list[int] = []
    left = np.full(len(sums), found.shape[1] > 0)
    while left.any():
        chosen.append(int(near[left].sum(axis=0).argmax()))
        left &= ~near[:, chosen[-1]]
    return chosen
