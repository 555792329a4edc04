"""The terms that what a phase holds is a sum of, over its lengths; see `experiments.plan.fit_curves`.

A term is its own formula, in what Python and JavaScript have in common: the page (visualization/fit) evaluates the
same ones. P and C are tokens of the prompt and of a completion, k the completions, W the tokens that a layer sees that
slides; (P > W) is 1 or 0. See `rooms` and `block` for the others.
"""

import functools

import numpy as np

from experiments.plan import extrapolate
from experiments.plan.events import REFERENCE

LM_HEAD_TILE = 4096  # tokens that TRL's fused LM head works on at a time on CUDA; a test holds it to TRL's
FIRST_ROOM = 64  # tokens that the cache of shared prompts has room for at first, and gets at least (`MIN_NEW_STEPS`)
# What the page offers. Two completions go together in a pass of `shared`, so k is even; from 4 on there are passes.
LEAST = {"prompt": 64, "completion": 64, "k": 4}
MOST = {"prompt": 65_536, "completion": 32_768, "k": 128}
PER_PASS = 2
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
    ("shared", "train"): ("P*C", "P*P", "(P>=W)*P*P", "block(P,C)", "C*block(P,C)", "k*P*C", "k*C*block(P,C)"),
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


def regimes(arm: str, window: int | None, phase: str, event: str, role: str = "early") -> tuple[str, ...]:
    """Formulas that are 1 at lengths where allocations behind an event are the same ones, at visits of this role
    (`extrapolate.role_of`), and 0 elsewhere. All of them are 0 where there is no such visit."""
    event = event.removeprefix(REFERENCE)
    if arm == "shared" and phase in ("score", "train") and (passes := passes_with(event, role)) > 2:
        return tuple(f"{when}*(k>{PER_PASS * (passes - 1)})" for when in regimes(arm, window, phase, event, "first"))
    if arm == "shared" and event == "grow":  # beyond the first room, and the token that is decoded last
        return tuple(f"{when}*(C>{FIRST_ROOM + 3})" for when in regimes(arm, window, phase, "forward"))
    if phase == "generate" and window:
        if arm == "shared":  # with a mask, rows decode together where all that they generated is less than the prompt
            return tuple(f"{seen}*{when}" for seen in ("(P<=W)", "(P>W)") for when in ("(k*(C-2)<P)", "(k*(C-2)>=P)"))
        return ("(P+C<W)", "(P<W)*(P+C>=W)", "(P>=W)")
    if phase in ("score", "train"):
        if event in AT_HEAD:
            return ("1", tiles(arm)[1])  # a second tile has allocations of its own
        if window and arm == "shared":
            return ("(P<W)", "(P>=W)") if event.startswith("prompt's") else TOGETHER
    return ("1",)


def passes_with(event: str, role: str) -> int:
    """The fewest passes in which layers are visited so: a pass that is computed again is not the last."""
    others = ("early", "late").index(role) + 1 if role in ("early", "late") else 0
    return len(extrapolate.ALONE[event]) + others + event.endswith(" again") if event in extrapolate.ALONE else 1


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
