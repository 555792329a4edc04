"""The training curves of the runs that learn."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from visualization import style
from visualization.results import Results, by_trainer


def convergence(results: Results) -> Figure | None:
    """Reward and KL per update of each arm's first run, one row of panels per trainer. None where no run learned.

    Each row tells the largest absolute difference between its arms at the same step. The loss is told alone:
    on-policy it is zero but for rounding."""
    done = results.own[results.own.status == "ok"].sort_values(["k", "repeat"]).drop_duplicates("arm")
    steps = results.trace[results.trace.run_id.isin(done.run_id)].sort_values("step")
    if steps.empty:
        return None
    groups = by_trainer(steps.arm)
    handles = [Line2D([], [], label=arm, **look(arms, arm)) for arms in groups for arm in arms]
    figure = style.new_figure(11, 3.4 * len(groups), "Training curves", style.footer(results), handles)
    grid = figure.subplots(len(groups), 2, squeeze=False, sharex=True)
    for arms, panels in zip(groups, grid, strict=True):
        mine = steps[steps.arm.isin(arms)]
        if len(arms) > 1:
            told = ", ".join(f"{name} {largest_difference(mine, name):.2g}" for name in ("reward", "kl", "loss"))
            panels[0].set_title(f"{', '.join(arms)}: largest absolute difference {told}", loc="left")
        for axes, name in zip(panels, ("reward", "kl"), strict=True):
            for arm in arms:
                rows = mine[mine.arm == arm]
                axes.plot(rows.step, rows[name].astype(float), **look(arms, arm))
        panels[0].set_ylabel("mean reward")
        # What the trainers log: TRL 0.21 the sum over a completion, TRL 1.x the mean over the tokens
        unit = "completion" if arms[0].startswith("classic") else "token"
        panels[1].set_ylabel(f"KL to the reference (nats per {unit})")
    for axes in grid[-1]:
        axes.set_xlabel("update")
    return figure


def look(arms: list[str], arm: str) -> dict:
    """Wide and pale below, thin and dark above: equal curves stay visible as two."""
    place = arms.index(arm)
    return {
        "color": style.colour(arm),
        "linewidth": max(1.2, 6 - 4 * place),
        "solid_capstyle": "round",
        "alpha": 0.45 if place < len(arms) - 1 else 1,
        "marker": style.marker(arm) if place else "",
        "markersize": 4,
    }


def largest_difference(steps: pd.DataFrame, name: str) -> float:
    by_step = steps.pivot(index="step", columns="arm", values=name).astype(float).dropna()
    return (by_step.max(axis=1) - by_step.min(axis=1)).max()
