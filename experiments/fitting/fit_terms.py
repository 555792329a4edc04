"""The terms that what a phase holds is a sum of, over its lengths; see `experiments.fitting.fit_curves`.

A term is its own formula, in what Python and JavaScript have in common: the page (visualization/fit) evaluates the
same ones. P and C are tokens of the prompt and of a completion, k the completions, W the tokens that a layer sees that
slides; (P > W) is 1 or 0. See `rooms` for the others.
"""

import functools

import numpy as np

from rloo_memory.plan.simulation.events import REFERENCE

LM_HEAD_TILE = 4096  # tokens that TRL's fused LM head works on at a time on CUDA; a test holds it to TRL's
FIRST_ROOM = 64  # tokens that the cache of shared prompts has room for at first, and gets at least (`MIN_NEW_STEPS`)
TOGETHER = 2  # completions in a micro-batch of `shared`, so k is even; on several cards, in a pass
# What the page offers
LEAST = {"prompt": 64, "completion": 64, "k": 4}
MOST = {"prompt": 65_536, "completion": 32_768, "k": 128}
# `shared` on several cards: whole groups in passes (`levers.shared`), in place of micro-batches
PASSES = "shared-passes"
GENERATE = ("k", "P", "k*P", "k*C")
SHARED_GENERATE = (*GENERATE, "k*room(P,C,0)", "k*before(P,C,0)")
ALL_ROWS, ONE_ROW = ("k", "P", "C", "k*P", "k*C", "k*P*P", "k*P*C", "k*C*C"), ("P", "C", "P*P", "P*C", "C*C")
IN_PASSES = ("k", "P", "C", "k*P", "k*C")
TERMS = {
    ("stock", "generate"): GENERATE, ("stock", "score"): ALL_ROWS, ("stock", "train"): ALL_ROWS,
    ("stock-accumulate", "generate"): GENERATE, ("stock-accumulate", "score"): ONE_ROW,
    ("stock-accumulate", "train"): ONE_ROW,
    ("shared", "generate"): SHARED_GENERATE, ("shared", "score"): IN_PASSES, ("shared", "train"): ("P", "C"),
    ("shared", "optimizer"): ("P", "C"),  # ids of the last micro-batch
    (PASSES, "generate"): SHARED_GENERATE, (PASSES, "score"): IN_PASSES, (PASSES, "train"): IN_PASSES,
}  # fmt: skip
# Two completions attend to a prompt together, or not: if they are at most a quarter of it, see `ReadPrefix`
BLOCKS = (f"({4 * TOGETHER}*C<=P)", f"({4 * TOGETHER}*C>P)")
WINDOW_GENERATE = ("k*min(P,W)", "k*min(P+C,W)", "k*P*P", "P*P")
WINDOW_SHARED_GENERATE = (
    "prefix(P,C,W)", "min(P,W-min(C,W))", "k*min(P,W-min(C,W))", "k*min(C,W)", "k*room(P,C,W)", "k*before(P,C,W)",
    "P*P",
)  # fmt: skip
MASKS = ("P*C", "P*P", "(P>W)*P*P", "C*C", f"{BLOCKS[0]}*C", f"{BLOCKS[0]}*C*C")
KEPT_MASKS = (*MASKS, "k*P*C", "k*C*C", f"k*{BLOCKS[0]}*C*C")  # of passes that are computed again
OF_WINDOWS = {
    ("stock", "generate"): WINDOW_GENERATE, ("stock-accumulate", "generate"): WINDOW_GENERATE,
    ("shared", "generate"): WINDOW_SHARED_GENERATE, ("shared", "score"): MASKS, ("shared", "train"): MASKS,
    (PASSES, "generate"): WINDOW_SHARED_GENERATE, (PASSES, "score"): MASKS, (PASSES, "train"): KEPT_MASKS,
}  # fmt: skip
# Events that come after the layers, where the LM head is, or what it has left
AT_HEAD = ("head", "head's backward", "head's end", "logits", "behind")


def tiles(arm: str, phase: str) -> tuple[str, ...]:
    """What the LM head works on at a time, and what there is besides if that is not all."""
    tokens = "C" if arm == "stock-accumulate" else f"{TOGETHER}*C" if (arm, phase) == ("shared", "train") else "k*C"
    return f"min({tokens},{LM_HEAD_TILE})", f"({tokens}>{LM_HEAD_TILE})", f"({tokens}>{LM_HEAD_TILE})*{tokens}"


def regimes(arm: str, window: int | None, phase: str, event: str) -> tuple[str, ...]:
    """Formulas that are 1 at lengths where allocations behind an event are the same ones, and 0 elsewhere."""
    event, shares = event.removeprefix(REFERENCE), arm in ("shared", PASSES)
    if shares and event == "grow":  # beyond the first room, and the token that is decoded last
        return tuple(f"{when}*(C>{FIRST_ROOM + 3})" for when in regimes(arm, window, phase, "forward"))
    if phase == "generate" and window:
        if shares:  # with a mask, rows decode together where all that they generated is less than the prompt
            return tuple(f"{seen}*{when}" for seen in ("(P<=W)", "(P>W)") for when in ("(k*(C-2)<P)", "(k*(C-2)>=P)"))
        return ("(P+C<W)", "(P<W)*(P+C>=W)", "(P>=W)")
    if phase not in ("score", "train"):
        return ("1",)
    of_prompt = event.startswith("prompt's")
    apart = ("(P<=W)", "(P>W)") if of_prompt else BLOCKS
    found = apart if window and shares and event not in AT_HEAD else ("1",)
    if event not in AT_HEAD:
        return found
    return (*found, *(f"{when}*{tiles(arm, phase)[1]}" for when in found))  # a second tile has allocations of its own


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


def value(formula: str, window: int | None, lengths: tuple[int, int, int]) -> float:
    """Of a term or a regime at a prompt, a completion and a k."""
    prompt, completion, k = lengths
    names = {
        "P": prompt, "C": completion, "k": k, "W": window or 0, "min": min,
        "room": lambda *lengths: rooms(*lengths)[0], "before": lambda *lengths: rooms(*lengths)[1],
        "prefix": lambda *lengths: rooms(*lengths)[2],
    }  # fmt: skip
    return float(eval(compiled(formula), {"__builtins__": {}}, names))


@functools.cache
def compiled(formula: str):
    return compile(formula, formula, "eval")


def terms(arm: str, window: int | None, phase: str, event: str) -> tuple[str, ...]:
    """`window`: of the layers that slide, where some do."""
    found = ("1", *TERMS.get((arm, phase), ()), *(OF_WINDOWS.get((arm, phase), ()) if window else ()))
    at_head = phase in ("score", "train") and event.removeprefix(REFERENCE) in AT_HEAD
    return found + tiles(arm, phase) if at_head else found


def table_of(formulas: tuple[str, ...], window: int | None, lengths) -> np.ndarray:
    """Values of formulas, a row for each of these lengths."""
    return np.array([[value(formula, window, each) for formula in formulas] for each in lengths])
