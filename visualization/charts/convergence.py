"""The training curves of the runs that learn."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from visualization import style
from visualization.runs import Run, by_trainer, cells


def updates(runs: Sequence[Run]) -> pd.DataFrame:
    """Step, arm, reward, loss and KL of each update, from the first finished repeat of each arm; empty without any."""
    first = [cell.finished[0] for cell in cells(runs) if cell.finished]
    return pd.DataFrame([{"arm": run.arm, **step} for run in first for step in run.trace])


def convergence(runs: Sequence[Run]) -> Figure | None:
    """Reward and KL per update, one curve per arm, one row of panels per trainer. None where no run learned.

    Each row tells the largest absolute difference between its arms at the same step. The loss is told alone:
    on-policy it is zero but for rounding."""
    steps = updates(runs)
    if steps.empty:
        return None
    groups = by_trainer(steps["arm"])
    handles = [
        Line2D([], [], label=arm, **_curve_look(place, arm, len(arms)))
        for arms in groups
        for place, arm in enumerate(arms)
    ]
    figure = style.new_figure(11, 3.4 * len(groups), "Training curves", style.footer(runs), handles)
    grid = figure.subplots(len(groups), 2, squeeze=False, sharex=True)
    for arms, panels in zip(groups, grid, strict=True):
        mine = steps[steps["arm"].isin(arms)]
        if len(arms) > 1:
            told = ", ".join(f"{name} {_largest_difference(mine, name):.2g}" for name in ("reward", "kl", "loss"))
            panels[0].set_title(f"{', '.join(arms)}: largest absolute difference {told}", loc="left")
        for axes, name in zip(panels, ("reward", "kl"), strict=True):
            for place, arm in enumerate(arms):
                rows = mine[mine["arm"] == arm].sort_values("step")
                axes.plot(rows["step"], rows[name], **_curve_look(place, arm, len(arms)))
        panels[0].set_ylabel("mean reward")
        # What the trainers log: TRL 0.21 the sum over a completion, TRL 1.x the mean over the tokens
        unit = "completion" if arms[0].startswith("classic") else "token"
        panels[1].set_ylabel(f"KL to the reference (nats per {unit})")
    for axes in grid[-1]:
        axes.set_xlabel("update")
    return figure


def _curve_look(place: int, arm: str, count: int) -> dict:
    """Wide and pale below, thin and dark above: equal curves stay visible as two."""
    return {
        "color": style.colour(arm),
        "linewidth": max(1.2, 6 - 4 * place),
        "solid_capstyle": "round",
        "alpha": 0.45 if place < count - 1 else 1,
        "marker": style.marker(arm) if place else "",
        "markersize": 4,
    }


def _largest_difference(steps: pd.DataFrame, name: str) -> float:
    by_step = steps.pivot_table(index="step", columns="arm", values=name).dropna()
    return float((by_step.max(axis=1) - by_step.min(axis=1)).max())
