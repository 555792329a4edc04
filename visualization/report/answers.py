"""What the figures say, in a few sentences: how much less memory, how much faster, does it train the same."""

import pandas as pd

from visualization.results import BASELINE, GIB, LEARN, RIVALS, Results, apart, by_trainer, what_it_is

LOGGED = ("reward", "loss", "kl")


def answers(results: Results) -> list[str]:
    """The model that is large enough for seconds first."""
    told, out = [], []
    for scale in reversed(results.charted()):
        cells = results.of(scale).cells
        told += [line for ours in RIVALS for line in beside_rival(cells, ours)] + published_change(cells)
        out += [f"{cell.arm} at k = {cell.k}" for cell in cells.itertuples() if cell.oom]
    told += [f"Out of memory: {', '.join(out)}."] if out else []
    return told + agreement(results)


def beside_rival(cells: pd.DataFrame, ours: str) -> list[str]:
    """The arm beside the strongest of its rivals, at the largest k that most of them finished; nothing without one."""
    done = cells[cells.ok > 0]
    rivals = done[done.arm.isin(RIVALS[ours]) & done.k.isin(done.k[done.arm == ours])]
    if rivals.empty:
        return []
    k = rivals.k.mode().max()
    mine, rival = done.loc[ours, k], done.loc[rivals[rivals.k == k].above_bytes.idxmin()]
    part, peaks = mine.above_bytes / rival.above_bytes, [f"{cell.above_bytes / GIB:.2f}" for cell in (mine, rival)]
    said = f"{what_it_is(ours)}, needs {part:.0%} of the memory of its strongest rival ({what_it_is(rival.arm)})"
    if not any(pd.isna(cell.step) or apart(cell.step_low, cell.step_high) for cell in (mine, rival)):
        said += f", and a step takes {mine.step:.1f} s in place of {rival.step:.1f} s"
    return [f"At k = {k}, {said}. The peaks are {peaks[0]} and {peaks[1]} GiB above the start level."]


def published_change(cells: pd.DataFrame) -> list[str]:
    """What the change of 2025 saves, and what it was fed, at the largest k of the baseline."""
    done = cells[cells.ok > 0]
    both = set(done.k[done.arm == BASELINE]) & set(done.k[done.arm == "classic-string"])
    if not both:
        return []
    base, string = done.loc[BASELINE, max(both)], done.loc["classic-string", max(both)]
    saved, tokens = 1 - string.above_bytes / base.above_bytes, f"{string.fed:,.0f} of {string.asked:,.0f}"
    return [f"At k = {string.k}, the change published in 2025 saves {saved:.0%} and was fed {tokens} prompt tokens."]


def agreement(results: Results) -> list[str]:
    """How far the updates of arms that were fed the same are from those of their trainer's first arm at most."""
    found: dict[str, list[pd.DataFrame]] = {}
    for scale in dict.fromkeys([*results.charted(), LEARN]):
        mine = results.of(scale)
        fed = mine.own.groupby("arm").fed.mean()
        for first, *others in by_trainer(arm for arm in mine.arms if pd.notna(fed[arm])):
            arms = [arm for arm in others if abs(fed[arm] - fed[first]) < 0.5]
            trainer = "TRL 0.21" if first.startswith("classic") else "TRL 1.16"
            found.setdefault(trainer, []).append(differences(results, scale, arms, first))
    joined = {trainer: pd.concat(frames) for trainer, frames in found.items()}
    return [
        f"It trains the same: over {len(far)} updates, arms of {trainer} that were fed the same differ by at most "
        f"{far.reward.max():.2g} in rewards and {far.loss.max():.2g} in losses."
        for trainer, far in joined.items()
        if len(far)
    ]


def differences(results: Results, scale: str, arms: list[str], first: str) -> pd.DataFrame:
    """Absolute differences of what was logged at the same k, repeat and step."""
    trace = results.trace[results.trace.scale == scale].astype(dict.fromkeys(LOGGED, float))
    at = ["k", "repeat", "step"]
    both = trace[trace.arm.isin(arms)].merge(trace[trace.arm == first], on=at, suffixes=("", "_first"))
    return both.assign(**{name: (both[name] - both[f"{name}_first"]).abs() for name in LOGGED})
