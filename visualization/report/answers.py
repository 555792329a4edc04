"""What the figures say, in a few sentences: how much memory, how much time, and is it exact."""

import pandas as pd

from visualization.results import ARMS, BASELINE, GIB, LEARN, RIVALS, Results, apart, by_trainer

LOGGED = ("reward", "loss", "kl")


def answers(results: Results) -> list[str]:
    found = []
    for scale in reversed(results.charted()):  # the model large enough for seconds first
        cells = results.of(scale).cells
        told = [*published_change(cells), *(line for ours in RIVALS for line in beside_rival(cells, ours))]
        out = [f"{cell.arm} at k = {cell.k}" for cell in cells.itertuples() if cell.oom]
        told += [f"Out of memory: {', '.join(out)}."] if out else []
        found += [f"Scale {scale}. {line}" for line in told]
    return found + agreement(results)


def beside_rival(cells: pd.DataFrame, ours: str) -> list[str]:
    """The arm beside the strongest of its rivals, at the largest k that most of them finished; nothing without one."""
    done = cells[cells.ok > 0]
    rivals = done[done.arm.isin(RIVALS[ours]) & done.k.isin(done.k[done.arm == ours])]
    if rivals.empty:
        return []
    k = rivals.k.mode().max()
    mine, rival = done.loc[ours, k], done.loc[rivals[rivals.k == k].above_bytes.idxmin()]
    names = [f"{cell.arm} ({ARMS[cell.arm]})" for cell in (mine, rival)]
    peaks = [f"{cell.above_bytes / GIB:.2f} GiB" for cell in (mine, rival)]
    said = (
        f"At k = {k}, {names[0]} peaks {peaks[0]} above the start level; the strongest rival, {names[1]}, {peaks[1]}."
    )
    if any(pd.isna(cell.step) or apart(cell.step_low, cell.step_high) for cell in (mine, rival)):
        return [said]
    return [f"{said} A step takes {mine.step:.1f} s and {rival.step:.1f} s."]


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
    lines = []
    for scale in dict.fromkeys([*results.charted(), LEARN]):
        mine = results.of(scale)
        fed = mine.own.groupby("arm").fed.mean()
        for first, *others in by_trainer(arm for arm in mine.arms if pd.notna(fed[arm])):
            arms = [arm for arm in others if abs(fed[arm] - fed[first]) < 0.5]
            found = differences(results, scale, arms, first)
            if len(found):
                most, whom = found[list(LOGGED)].max(), f"{', '.join(arms)} beside {first}"
                words = f"rewards differ by at most {most.reward:.2g} and losses by at most {most.loss:.2g}"
                lines.append(f"Scale {scale}. Over {len(found)} updates of {whom}, {words}.")
    return lines


def differences(results: Results, scale: str, arms: list[str], first: str) -> pd.DataFrame:
    """Absolute differences of what was logged at the same k, repeat and step."""
    trace = results.trace[results.trace.scale == scale].astype(dict.fromkeys(LOGGED, float))
    at = ["k", "repeat", "step"]
    both = trace[trace.arm.isin(arms)].merge(trace[trace.arm == first], on=at, suffixes=("", "_first"))
    return both.assign(**{name: (both[name] - both[f"{name}_first"]).abs() for name in LOGGED})
